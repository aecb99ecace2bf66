"""Computations of the training model's layers other than megatron's parallel linear layers."""
