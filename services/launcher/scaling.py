"""Sends `tether scale` requests to a running `tether up`, as a file in the run directory.

`tether up` deletes the file after applying the change. The lock of the run directory shows whether a `tether
up` is running.
"""

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from protocol.errors import SettingsError, TetherError
from protocol.host.file_lock import locked
from protocol.topics import Role
from protocol.validation import check_range
from services.launcher.fleet import SCALABLE, Fleet
from services.run_record.end import LOCK, is_up
from services.settings.checks import check_workers
from services.settings.load import run_settings
from services.settings.processes import ServicesConfig

log = logging.getLogger("tether.up")

FILE = "scale.json"
POLL_S = 0.2
LOCK_S = 0.5
"""Seconds that `tether up` waits for the lock, which queries for a running `tether up` hold briefly."""
ANSWER_S = 120.0
"""Seconds that `tether scale` waits beyond `rollout.drain_s` per role: removed workers first release their
work."""


@contextlib.contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold the lock of the run directory within the block.

    Raises:
        SettingsError: another `tether up` holds the lock.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(run_dir / LOCK, create=True, timeout_s=LOCK_S))
        except BlockingIOError:
            raise SettingsError(
                f"another `tether up` is running in {run_dir}: stop it, or give --run-dir"
            ) from None
        with contextlib.suppress(IsADirectoryError):  # not a request: `scale_loop` reports it
            (run_dir / FILE).unlink(missing_ok=True)  # left by a request without a running `tether up`
        yield


def parse_counts(arguments: list[str]) -> dict[Role, int]:
    """Parse arguments such as `rollouts=3 rewards=1`; return the counts by role.

    Raises:
        SettingsError: an argument is invalid; the message has the argument.
    """
    names = {f"{role}s": role for role in SCALABLE}
    counts: dict[Role, int] = {}
    for argument in arguments:
        name, _, text = argument.partition("=")
        if name not in names or not text.isascii() or not text.isdigit():
            raise SettingsError(f"{argument!r}: write {' or '.join(f'{option}=N' for option in names)}")
        check_range(ServicesConfig, name, int(text), repr(argument))
        counts[names[name]] = int(text)
    return counts


def scale_run(run_dir: Path, counts: Mapping[Role, int]) -> str:
    """Change the numbers of workers of a running `tether up`; return a line about them.

    Raises:
        SettingsError: no `tether up` is running, or the settings do not allow the numbers.
    """
    drain_s = 0.0
    if is_up(run_dir):
        settings = run_settings(run_dir)
        check_workers(settings, counts.get(Role.ROLLOUT, 0))
        drain_s = settings.rollout.drain_s
    request_scale(run_dir, counts, drain_s)
    return ", ".join(f"{role}s {count}" for role, count in counts.items())


def request_scale(run_dir: Path, counts: Mapping[Role, int], drain_s: float = 0.0) -> None:
    """Request other numbers of processes from the `tether up` of a run directory; wait until applied.

    Args:
        run_dir: directory of the run.
        counts: role -> number of processes.
        drain_s: `rollout.drain_s`, the time for removed workers to drain.

    Raises:
        SettingsError: no `tether up` is running, or it is applying another request.
        TetherError: the change was not applied in time, or `tether up` has ended; the request is withdrawn.
    """
    if not is_up(run_dir):
        raise SettingsError(
            f"no `tether up` is running in {run_dir}: "
            "start it with --rollouts and --rewards, or start services yourself"
        )
    request = run_dir / FILE
    draft = run_dir / f"{FILE}.{os.getpid()}"
    draft.write_text(json.dumps([f"{role}s={count}" for role, count in counts.items()]))
    try:
        os.link(draft, request)
    except FileExistsError:
        raise SettingsError(f"another `tether scale` on {run_dir} is under way: wait for it") from None
    finally:
        draft.unlink()
    answer_s = ANSWER_S + len(counts) * drain_s
    deadline = time.monotonic() + answer_s
    while request.exists():
        if not is_up(run_dir):
            request.unlink(missing_ok=True)
            raise TetherError(f"`tether up` in {run_dir} ended before it applied the change; see its output")
        if time.monotonic() > deadline:
            request.unlink(missing_ok=True)
            raise TetherError(
                f"`tether up` in {run_dir} did not apply the change within {answer_s:.0f} s; see its output"
            )
        time.sleep(POLL_S / 2)


async def scale_loop(run_dir: Path, fleet: Fleet) -> None:
    """Apply the requests of `request_scale`, until cancelled."""
    request, is_reported = run_dir / FILE, False
    while True:
        await asyncio.sleep(POLL_S)
        try:
            counts = parse_counts(msgspec.json.decode(request.read_bytes(), type=list[str]))
        except FileNotFoundError:
            is_reported = False
            continue
        except IsADirectoryError:  # logged once: it stays until the user removes it
            if not is_reported:
                log.warning("scale.is_directory path=%s: remove it, it blocks `tether scale`", request)
            is_reported = True
            continue
        except ValueError as error:  # not written by `request_scale`
            log.error("scale.unreadable error=%s", error)
            counts = {}
        for role, count in counts.items():
            log.info("scale role=%s count=%d", role, count)
            await fleet.scale(role, count)
        request.unlink(missing_ok=True)
