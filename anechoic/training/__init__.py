"""Training: the loop, what it is built of, what it minimizes and how weights move."""
