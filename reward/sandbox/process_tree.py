"""Kills a process together with everything that it started."""

import contextlib
import os
import signal

import psutil  # type: ignore[import-untyped]

ROUNDS = 20
"""How often to search for new descendants; a tree that forks faster is bounded by its limit on processes."""


def kill_process_tree(pid: int) -> None:
    """Kill a child that leads a process group, its descendants, and the group; does not wait for their exit.

    Descendants that left the group can only be found through their parents, so descendants are killed first,
    again and again until none is left.
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
