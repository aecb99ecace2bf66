"""Computations of layers: packed attention, the output layer (both shared by all backends), and FP8."""
