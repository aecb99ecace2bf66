"""Passes `tether scale` to a running `tether up`, by a file in the run directory.

`tether up` deletes the file once it has applied the change. The lock of the run directory shows whether a
`tether up` is running at all.
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
ASKED_S = 0.5
"""How long `tether up` waits for the lock: who asks whether one is running holds it for a moment."""
ANSWER_S = 120.0
"""How long `tether scale` waits beyond `rollout.drain_s` of each role: a worker that is removed first hands
back what it holds."""


@contextlib.contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold the lock of the run directory within the block.

    Raises:
        SettingsError: another `tether up` holds it.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(run_dir / LOCK, create=True, timeout_s=ASKED_S))
        except BlockingIOError:
            raise SettingsError(
                f"another `tether up` is running in {run_dir}: stop it, or give --run-dir"
            ) from None
        (run_dir / FILE).unlink(missing_ok=True)  # a request that no `tether up` was there to apply
        yield


def parse_counts(arguments: list[str]) -> dict[Role, int]:
    """Return the counts in arguments such as `rollouts=3 rewards=1`.

    Raises:
        SettingsError: names the argument that is wrong.
    """
    names = {f"{role}s": role for role in SCALABLE}
    counts: dict[Role, int] = {}
    for argument in arguments:
        name, _, text = argument.partition("=")
        if name not in names or not text.isascii() or not text.isdigit():
            raise SettingsError(f"{argument!r}: write {' or '.join(f'{known}=N' for known in names)}")
        check_range(ServicesConfig, name, int(text), repr(argument))
        counts[names[name]] = int(text)
    return counts


def scale_run(run_dir: Path, counts: Mapping[Role, int]) -> str:
    """Have a `tether up` keep other numbers of workers; return a line about them.

    Raises:
        SettingsError: it is not on, or may not have so many.
    """
    drain_s = 0.0
    if is_up(run_dir):
        settings = run_settings(run_dir)
        check_workers(settings, counts.get(Role.ROLLOUT, 0))
        drain_s = settings.rollout.drain_s
    request_scale(run_dir, counts, drain_s)
    return ", ".join(f"{role}s {count}" for role, count in counts.items())


def request_scale(run_dir: Path, counts: Mapping[Role, int], drain_s: float = 0.0) -> None:
    """Have the `tether up` of a run directory change its numbers of processes, and wait until it has.

    Args:
        run_dir: of the run.
        counts: processes of each role.
        drain_s: `rollout.drain_s`, which workers that are removed may take.

    Raises:
        SettingsError: none is running, or it is applying another such change.
        TetherError: it did not apply the change in time, or has ended; the request is withdrawn.
    """
    if not is_up(run_dir):
        raise SettingsError(
            f"no `tether up` is running in {run_dir}: "
            "start it with --rollouts and --rewards, or start services yourself"
        )
    request = run_dir / FILE
    aside = run_dir / f"{FILE}.{os.getpid()}"
    aside.write_text(json.dumps([f"{role}s={count}" for role, count in counts.items()]))
    try:
        os.link(aside, request)
    except FileExistsError:
        raise SettingsError(f"another `tether scale` on {run_dir} is under way: wait for it") from None
    finally:
        aside.unlink()
    answer_s = ANSWER_S + len(counts) * drain_s
    until = time.monotonic() + answer_s
    while request.exists():
        if not is_up(run_dir):
            request.unlink(missing_ok=True)
            raise TetherError(f"`tether up` in {run_dir} ended before it applied the change; see its output")
        if time.monotonic() > until:
            request.unlink(missing_ok=True)
            raise TetherError(
                f"`tether up` in {run_dir} did not apply the change within {answer_s:.0f} s; see its output"
            )
        time.sleep(POLL_S / 2)


async def scale_loop(run_dir: Path, fleet: Fleet) -> None:
    """Apply the requests of `request_scale`, until cancelled."""
    request = run_dir / FILE
    while True:
        await asyncio.sleep(POLL_S)
        try:
            counts = parse_counts(msgspec.json.decode(request.read_bytes(), type=list[str]))
        except FileNotFoundError:
            continue
        except ValueError as error:  # not written by `request_scale`
            log.error("scale.unreadable error=%s", error)
            counts = {}
        for role, count in counts.items():
            log.info("scale role=%s count=%d", role, count)
            await fleet.scale(role, count)
        request.unlink(missing_ok=True)
