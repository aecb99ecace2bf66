"""Knows since when this process is the service that it is: one that was a spare is older than that."""

import time

import psutil  # type: ignore[import-untyped]

_since: float | None = None


def begin_now() -> None:
    """Note that the process becomes a service now."""
    global _since
    _since = time.time()


def seconds_since_start() -> float:
    """Return for how long the process has been this service, seconds."""
    return float(time.time() - (psutil.Process().create_time() if _since is None else _since))
