"""Trains: takes scored groups, makes optimizer steps, publishes their weights and commits them."""

from services.trainer.service import serve

__all__ = ["serve"]
