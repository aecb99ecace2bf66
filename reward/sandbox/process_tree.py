"""Kills a process and all of its descendants."""

import contextlib
import os
import signal

import psutil  # type: ignore[import-untyped]

ROUNDS = 20
"""Maximum number of searches for new descendants. Process limits bound trees that fork faster."""


def kill_process_tree(pid: int) -> None:
    """Kill a child that leads a process group, its descendants, and the group; do not wait for their exit.

    Descendants that left the group can only be found through their parents, so descendants are killed first,
    repeatedly until none is left.
    """
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        for _ in range(ROUNDS):
            children = [
                child for child in root.children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE
            ]
            for child in children:
                with contextlib.suppress(psutil.Error):
                    child.kill()
            if not children:
                break
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
