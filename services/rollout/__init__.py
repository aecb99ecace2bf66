"""Runs the rollout worker."""

from services.rollout.service import serve

__all__ = ["serve"]
