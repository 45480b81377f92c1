"""Sweeps: many trials of a recipe, each trained, evaluated and kept as one JSON record."""
