"""How torch's NCCL groups behave when their other side dies; it reads this from the environment when a group is made."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

QUIET = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # 0: an error of this group does not end the process
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # nor does a watchdog of torch's that is held up
}

_lock = threading.Lock()


@contextmanager
def unwatched() -> Iterator[None]:
    """Within this, groups are made that have no watchdog: whoever makes them bounds every wait. Other groups keep theirs."""
    with _lock:
        before = {name: os.environ.get(name) for name in QUIET}
        os.environ.update(QUIET)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
