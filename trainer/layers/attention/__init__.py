"""Computes attention over packed sequences: parameters, visible keys and kernels."""
