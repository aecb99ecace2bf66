"""What `tether up` prints while a run is on: a line a step, and who waits for whom when nothing moves."""

import asyncio
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from protocol.errors import TetherError
from protocol.topics import Role
from services.ledger.interface import Ledger, LedgerStatus
from services.observability.steps import read_lines

POLL_S = 0.5
NUMBER = re.compile(r"\d+")
QUIET_S = 15.0
"""After so long without a step, say who waits for what."""


class Supervised(Protocol):
    """What progress needs to know of a child process."""

    @property
    def restarts(self) -> int: ...


class Progress:
    """Prints to a stream; keeps nothing."""

    def __init__(self, run_dir: Path, steps: int, out: TextIO = sys.stdout) -> None:
        self._run_dir, self._steps, self._out = run_dir, steps, out
        self._printed = len(list(read_lines(run_dir / "metrics.jsonl")))
        self._last = time.monotonic()
        self._began = time.monotonic()

    def note(self, text: str) -> None:
        """Print a remark."""
        if text:
            print(text, file=self._out, flush=True)

    async def watch_loop(self, ledger: Ledger, children: Mapping[Any, Sequence[Supervised]]) -> None:
        """Print where the monitor's page is, and new steps, until cancelled."""
        page = ""
        while True:
            if not page:
                page = await page_of(ledger)
                self.note(f"page {page}" if page else "")
            self._print_steps(sum(child.restarts for group in children.values() for child in group))
            if time.monotonic() - self._last > QUIET_S:
                self._last = time.monotonic()
                self.note(await describe_waits(ledger))
            await asyncio.sleep(POLL_S)

    def finish(self, status: LedgerStatus) -> None:
        """Print what is left to say at the end."""
        self._print_steps(0)
        self.note(
            f"{'done' if status.done else 'stopped'} at version {status.version} of {status.steps} "
            f"after {time.monotonic() - self._began:.0f} s: "
            f"{status.trained} groups trained, {status.dropped} dropped, {status.active} in flight"
        )

    def _print_steps(self, restarts: int) -> None:
        lines = list(read_lines(self._run_dir / "metrics.jsonl"))
        for line in lines[self._printed :]:  # after a rewind steps come again
            seconds = line["wait_s"] + line["train_s"] + line["publish_s"]
            self.note(
                f"step {line['version']:>4}/{self._steps}  reward {line['reward_mean']:6.3f}  "
                f"lag {line['lag_mean']:.2f} max {line['lag_max']}  "
                f"{line['trained_tokens'] / max(seconds, 1e-9):8.0f} tokens/s  wait {line['wait_s']:.2f} s  train {line['train_s']:.2f} s  "
                f"publish {line['publish_s']:.2f} s" + (f"  restarts {restarts}" if restarts else "")
            )
            self._last = time.monotonic()
        self._printed = len(lines)


async def page_of(ledger: Ledger) -> str:
    """URL of the monitor's page; empty while there is none."""
    try:
        return next(
            (str(peer.info["page"]) for peer in await ledger.peers(Role.MONITOR) if "page" in peer.info), ""
        )
    except TetherError:
        return ""


async def describe_waits(ledger: Ledger) -> str:
    """One line: which process waits for what, and for how long."""
    try:
        peers = await ledger.peers()
    except TetherError as error:
        return f"waiting: the ledger does not answer ({error})"
    alike: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for peer in peers:
        for what, seconds in peer.info.get("waits", {}).items():
            alike.setdefault((str(peer.info.get("name", peer.role)), NUMBER.sub("N", what)), []).append(
                (seconds, what)
            )
    waits = []
    for (name, kind), found in alike.items():
        seconds, what = max(found)
        if seconds >= 1:
            waits.append(
                f"{name} waits for {f'{kind} ({len(found)} times, ' if len(found) > 1 else f'{what} ('}{seconds:.0f} s)"
            )
    return "waiting: " + (
        "; ".join(waits[:8]) if waits else f"{len(peers)} processes are up, none of them waits"
    )
