"""Training: the loop, what it is built of, what it minimises and how weights move."""
