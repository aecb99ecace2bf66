"""Ending a process together with everything that it started."""

import contextlib
import os
import signal

import psutil  # type: ignore[import-untyped]

ROUNDS = 20
"""Looks for new descendants; one that forks faster than this is bound by its limit on processes."""


def kill_process_tree(pid: int) -> None:
    """Kill a child of ours that leads a process group, its descendants and the group. Does not wait for them.

    Descendants that left the group are found by their parents, so they are killed first, and looked for until
    there are no more.
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
