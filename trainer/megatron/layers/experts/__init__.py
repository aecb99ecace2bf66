"""Computes layers whose MLP is a choice of experts for each token."""
