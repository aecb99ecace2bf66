"""Environments, which turn one prompt into one sample."""
