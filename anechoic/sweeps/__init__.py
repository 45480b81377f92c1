"""Sweeps: trials of a recipe, each trained, evaluated and written as one JSON record."""
