"""Evaluation of frozen features: an encoder and data in, named values out; nothing here trains the network."""
