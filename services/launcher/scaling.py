"""How `tether scale` reaches a running `tether up`: by a file in the run directory that the latter takes away
once it has obeyed.

The lock of the run directory says whether there is a `tether up` at all.
"""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from protocol.errors import SettingsError, TetherError
from protocol.topics import Role
from services.launcher.fleet import SCALABLE, Fleet
from services.settings.checks import RANGES

log = logging.getLogger("tether.up")

FILE = "scale.json"
LOCK = "lock"
POLL_S = 0.2
ANSWER_S = 120.0
"""A worker that is scaled down may take a while to hand back what it holds."""


@contextlib.contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold the run directory; a second `tether up` on it is refused."""
    with (run_dir / LOCK).open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SettingsError(
                f"another `tether up` is running in {run_dir}: stop it, or give --run-dir"
            ) from None
        (run_dir / FILE).unlink(missing_ok=True)  # nobody was there to obey it
        yield


def is_up(run_dir: Path) -> bool:
    """Whether a `tether up` runs in the directory."""
    try:
        with (run_dir / LOCK).open() as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def parse_counts(words: list[str]) -> dict[Role, int]:
    """What the user wrote: `rollouts=3 rewards=1`.

    Raises:
        SettingsError: names the word.
    """
    names = {f"{role}s": role for role in SCALABLE}
    counts: dict[Role, int] = {}
    for word in words:
        name, _, text = word.partition("=")
        if name not in names or not text.isascii() or not text.isdigit():
            raise SettingsError(f"{word!r}: write {' or '.join(f'{known}=N' for known in names)}")
        low, high = RANGES[f"services.{name}"]
        if not low <= int(text) <= high:
            raise SettingsError(f"{word!r}: not between {low:g} and {high:g}")
        counts[names[name]] = int(text)
    return counts


def request_scale(run_dir: Path, counts: Mapping[Role, int]) -> None:
    """Have the `tether up` of a run directory change its numbers of processes, and wait until it has.

    Raises:
        SettingsError: there is none, or it is busy with another such change.
        TetherError: it did not obey within `ANSWER_S`; the request is taken back.
    """
    if not is_up(run_dir):
        raise SettingsError(
            f"no `tether up` is running in {run_dir}: start it with --rollouts and --rewards, or start services yourself"
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
    until = time.monotonic() + ANSWER_S
    while request.exists():
        if time.monotonic() > until or not is_up(run_dir):
            request.unlink(missing_ok=True)
            raise TetherError(f"`tether up` in {run_dir} did not obey; see what it printed")
        time.sleep(POLL_S / 2)


async def scale_loop(run_dir: Path, fleet: Fleet) -> None:
    """Do what `request_scale` asks for, until cancelled."""
    request = run_dir / FILE
    while True:
        await asyncio.sleep(POLL_S)
        try:
            counts = parse_counts(json.loads(request.read_text()))
        except FileNotFoundError:
            continue
        except (ValueError, AttributeError, TypeError) as error:  # not one of ours
            log.error("scale.unreadable error=%s", error)
            counts = {}
        for role, count in counts.items():
            log.info("scale role=%s count=%d", role, count)
            await fleet.scale(role, count)
        request.unlink(missing_ok=True)
