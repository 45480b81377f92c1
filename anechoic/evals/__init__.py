"""Judges of frozen features: features and labels in, numbers out; none of them trains the network it judges."""
