"""Holds the device's lock together with a child process, started as vLLM starts its own.

    python -m tests.services.gpu_sharing.device_owner RUN_DIR [HOW]

HOW: "" holds it as an engine that is awake, "asleep" has released it, "ranks" as the ranks of a trainer. It
prints the pid of the child, which has received the descriptor by then.
"""

import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from rollout.engines.multi_process.parent_watch import OWNER, exit_with_parent
from services.gpu_sharing.device_lock import DeviceLock, inherited_device


def engine(ready: Connection) -> None:
    assert exit_with_parent(lambda owner: os._exit(1))
    ready.send("")
    signal.pause()


def rank(run_dir: Path, ready: Connection) -> None:
    device = inherited_device(run_dir)
    assert device is not None
    assert device.try_acquire(exclusive=True)
    ready.send("")
    signal.pause()


def main(run_dir: Path, how: str) -> None:
    os.environ[OWNER] = str(os.getpid())
    device = DeviceLock(run_dir)
    device.allow_children()
    assert how == "ranks" or device.try_acquire(exclusive=False)
    ours, theirs = multiprocessing.Pipe()
    spawning = multiprocessing.get_context("spawn")
    child = (
        spawning.Process(target=rank, args=(run_dir, theirs))
        if how == "ranks"
        else spawning.Process(target=engine, args=(theirs,))
    )
    child.start()
    ours.recv()
    if how == "asleep":
        device.release()
    print(child.pid, flush=True)
    signal.pause()


if __name__ == "__main__":
    main(Path(sys.argv[1]), " ".join(sys.argv[2:]))
