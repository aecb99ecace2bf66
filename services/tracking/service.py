"""Runs `python -m services.tracking`: sends the metrics of a run to the libraries of `tracking.kind`.

Consumes: metrics.jsonl and eval.jsonl. Needs no ledger and no other service, and no service waits for it.
`tether up` runs one process per kind.
"""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator

from protocol.errors import SettingsError
from protocol.host.file_lock import locked
from services.runtime.errors import configure_logging, exit_with
from services.runtime.event_loop import STOP_SIGNALS
from services.settings.load import load_settings
from services.settings.sections import Settings
from services.tracking.state import FOLDER, TrackingState
from services.tracking.tracked_run import TrackedRun

log = logging.getLogger("tether.tracking")

END_S = 5.0
"""Seconds beyond `tracking.flush_s` to wait for another process that tracks the run."""
POLL_S = 0.5
"""Seconds between two reads of files without new lines."""


class Stop:
    """Stop event of SIGTERM and SIGINT; ends the process if a library exceeds its time."""

    def __init__(self, flush_s: float) -> None:
        """Install the signal handlers; after the first signal the process has `flush_s` seconds."""
        self.requested = threading.Event()
        self._flush_s = flush_s
        arrived, arrives = os.pipe()
        os.set_blocking(arrives, False)
        # a handler runs in the main thread, which a library may block; the descriptor's reader thread is free
        signal.set_wakeup_fd(arrives)
        for signum in STOP_SIGNALS:
            signal.signal(signum, lambda signum, frame: self.requested.set())
        threading.Thread(target=self._end_in_time, args=(arrived,), name="stop", daemon=True).start()

    def _end_in_time(self, arrived: int) -> None:
        while os.read(arrived, 1)[0] not in STOP_SIGNALS:
            pass
        self.requested.set()
        time.sleep(self._flush_s)
        log.warning("tracking.given_up after_s=%.0f: the rest is sent with the next start", self._flush_s)
        os._exit(0)


@contextlib.contextmanager
def open_runs(settings: Settings, wait_s: float = 0.0) -> Iterator[list[TrackedRun]]:
    """Open a run in its libraries, and lock out other tracking processes within the block.

    Args:
        settings: settings of the run.
        wait_s: seconds to wait for another process that tracks the run.

    Raises:
        SettingsError: no library is set, or another process tracks the run.
    """
    if not settings.tracking.kind:
        raise SettingsError("setting tracking.kind is empty: name a library, such as tensorboard")
    folder = settings.run_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        for kind in settings.tracking.kind:
            try:
                stack.enter_context(locked(folder / f"{kind}.lock", create=True, timeout_s=wait_s))
            except BlockingIOError:
                raise SettingsError(f"another process tracks {settings.run_dir} with {kind}") from None
        yield [TrackedRun(kind, settings) for kind in settings.tracking.kind]


def track_rest(settings: Settings) -> dict[str, TrackingState]:
    """Send the points of a finished run that the libraries lack; return the states by kind.

    Raises:
        SettingsError: no library is set, or another process tracks the run.
    """
    with open_runs(settings) as runs:
        for run in runs:
            run.finish()
        return {run.kind: run.state for run in runs}


def track_until_stopped(settings: Settings) -> None:
    """Send new points until SIGTERM or SIGINT; then the remaining points, within `tracking.flush_s`."""
    stop = Stop(settings.tracking.flush_s)
    # the process of a killed `tether up` may still be flushing
    with open_runs(settings, settings.tracking.flush_s + END_S) as runs:
        while not stop.requested.is_set():
            if not any([run.advance() for run in runs]):
                stop.requested.wait(POLL_S)
        for run in runs:
            run.finish()


def main() -> None:
    """Run `python -m services.tracking`."""
    try:
        configure_logging(os.environ.get("TETHER_INSTANCE", "tracking"))
        track_until_stopped(load_settings())
    except Exception as error:
        exit_with(error, "tether tracking")
