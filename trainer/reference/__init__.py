"""Implements the reference backend: plain torch and transformers, the oracle of the other backends."""
