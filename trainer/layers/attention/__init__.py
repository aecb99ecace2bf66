"""Computes attention over packed sequences: what it is, and the kernels that compute it."""
