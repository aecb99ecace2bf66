"""Measures the time since this process became a service; a former spare is older than its service."""

import time

import psutil  # type: ignore[import-untyped]

_since: float | None = None


def begin_now() -> None:
    """Record that the process becomes a service now."""
    global _since
    _since = time.time()


def seconds_since_start() -> float:
    """Return the seconds since the process became this service."""
    return float(time.time() - (psutil.Process().create_time() if _since is None else _since))
