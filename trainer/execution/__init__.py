"""Executes the same commands on every rank of the trainer."""
