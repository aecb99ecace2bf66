"""Generates with the training model, from a paged KV cache."""
