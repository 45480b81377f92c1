"""Other libraries: one file each, with the blocks to convert, the encoder to embed with and the weights in and out."""
