"""Scores versions on held-out prompts while a run is on."""

from services.evaluation.service import serve

__all__ = ["serve"]
