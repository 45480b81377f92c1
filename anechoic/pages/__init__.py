"""Static pages: HTML from what is already measured, without torch and without anything loaded from elsewhere."""
