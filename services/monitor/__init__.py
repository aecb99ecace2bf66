"""Serves a read-only web page of a run."""

from services.monitor.service import serve
from services.monitor.standalone import run_monitor

__all__ = ["run_monitor", "serve"]
