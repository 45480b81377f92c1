"""Our own studies: when decayed shortcuts pay, over length, data, optimizer and depth."""
