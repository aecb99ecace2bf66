"""Runs the ingest."""

from services.ingest.service import serve

__all__ = ["serve"]
