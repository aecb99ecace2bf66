"""Provides environments. An environment turns one prompt into one sample."""
