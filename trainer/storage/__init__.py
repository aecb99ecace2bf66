"""Stores groups and models on disk: spool, archive, checkpoints."""
