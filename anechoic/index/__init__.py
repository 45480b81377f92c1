"""An index of a collection of images: vectors, queries, neighbors, near-duplicates, outliers and clusters."""
