"""Trains the model: takes scored groups, makes optimizer steps, publishes and commits their versions."""

from services.trainer.service import serve

__all__ = ["serve"]
