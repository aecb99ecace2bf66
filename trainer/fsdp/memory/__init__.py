"""Predicts the memory of a rank and of a host."""
