"""Serves a read-only web page of a run."""

from services.monitor.service import serve

__all__ = ["serve"]
