"""Computations of layers: packed attention and the output layer, which both backends share, and FP8."""
