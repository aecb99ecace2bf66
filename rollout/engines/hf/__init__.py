"""Serves models of transformers, the reference engine."""
