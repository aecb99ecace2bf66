"""Defines the interface of training backends, and holds the helpers that they share."""
