"""The trainer."""

from services.trainer.service import serve

__all__ = ["serve"]
