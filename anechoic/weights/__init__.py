"""Weights in and out: other people's checkpoints become our networks, ours become files that other programs open.

Reading never runs code from a file. How a network trains or is evaluated is not said here.
"""
