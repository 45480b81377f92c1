"""Metrics of frozen features, one file each."""
