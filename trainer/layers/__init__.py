"""Computations of a model's layers that both training backends share: packed attention, the output layer."""
