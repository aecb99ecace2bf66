"""The monitor."""

from services.monitor.service import serve

__all__ = ["serve"]
