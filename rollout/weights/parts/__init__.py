"""Receives slices of versions that stay on the trainer's ranks."""
