"""Environments, each of which turns one prompt into one sample."""
