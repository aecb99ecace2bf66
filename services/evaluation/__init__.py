"""Scores versions on held-out prompts during a run."""

from services.evaluation.service import serve

__all__ = ["serve"]
