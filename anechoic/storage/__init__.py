"""Files on disk: written whole or not at all, read safely, cached by content."""
