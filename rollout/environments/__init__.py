"""Environments: how one prompt becomes one sample."""
