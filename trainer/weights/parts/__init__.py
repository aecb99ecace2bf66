"""Publishes versions that stay on the trainer's ranks: each serves its own pieces."""
