"""Defines the interface of training backends, and holds what they share."""
