"""Prints the progress of `tether up`, and draws it: each step, and what is waited for when none is made."""

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
from services.observability.steps import read_lines, read_steps

POLL_S = 0.5
NUMBER = re.compile(r"\d+")
"""Waits that differ only in a number are printed as one."""
QUIET_S = 15.0
"""Seconds without a step after which the waits are printed."""


class Supervised(Protocol):
    """What `Progress` reads of a child process."""

    @property
    def restarts(self) -> int:
        """Restarts so far."""


class Progress:
    """Prints the steps of a run to a stream."""

    def __init__(self, run_dir: Path, steps: int, out: TextIO = sys.stdout) -> None:
        self._run_dir, self._steps, self._out = run_dir, steps, out
        self._printed = len(list(read_lines(run_dir / "metrics.jsonl")))
        self._last = time.monotonic()
        self._began = time.monotonic()

    def note(self, text: str) -> None:
        """Print a line, if there is text."""
        if text:
            print(text, file=self._out, flush=True)

    async def watch_loop(self, ledger: Ledger, children: Mapping[Any, Sequence[Supervised]]) -> None:
        """Print the URL of the monitor's page, new steps and long waits, until cancelled."""
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
        """Print the last steps and how the run ended."""
        self._print_steps(0)
        self.note(
            f"{'done' if status.done else 'stopped'} at version {status.version} of {status.steps} "
            f"after {time.monotonic() - self._began:.0f} s: "
            f"{status.trained} groups trained, {status.dropped} dropped, {status.active} in flight"
        )

    def _print_steps(self, restarts: int) -> None:
        lines = list(read_lines(self._run_dir / "metrics.jsonl"))
        for line in lines[self._printed :]:  # after a rewind steps appear again
            seconds = line["wait_s"] + line["train_s"] + line["publish_s"]
            self.note(
                f"step {line['version']:>4}/{self._steps}  reward {line['reward_mean']:6.3f}  "
                f"lag {_shown(line['lag_mean'])} max {_shown(line['lag_max'])}  "
                f"{line['trained_tokens'] / max(seconds, 1e-9):8.0f} tokens/s  "
                f"wait {line['wait_s']:.2f} s  train {line['train_s']:.2f} s  "
                f"publish {line['publish_s']:.2f} s" + (f"  restarts {restarts}" if restarts else "")
            )
            for warning in line.get("warnings", ()):
                self.note(f"warning: {warning}")
            self._last = time.monotonic()
        self._printed = len(lines)


def _shown(value: float | None) -> str:
    """Return a number, or a dash where nothing was measured."""
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


async def page_of(ledger: Ledger) -> str:
    """Return the URL of the monitor's page, or an empty string while there is none."""
    try:
        return next(
            (str(peer.info["page"]) for peer in await ledger.peers(Role.MONITOR) if "page" in peer.info), ""
        )
    except TetherError:
        return ""


async def describe_waits(ledger: Ledger) -> str:
    """Return one line that names which process waits for what, and for how long."""
    try:
        peers = await ledger.peers()
    except TetherError as error:
        return f"waiting: the ledger does not answer ({error})"
    by_kind: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for peer in peers:
        for what, seconds in peer.info.get("waits", {}).items():
            name = str(peer.info.get("name", peer.role))
            by_kind.setdefault((name, NUMBER.sub("N", what)), []).append((seconds, what))
    waits = []
    for (name, kind), found in by_kind.items():
        seconds, what = max(found)
        if seconds >= 1:
            count = len(found)
            shown = f"{kind} ({count} times, " if count > 1 else f"{what} ("
            waits.append(f"{name} waits for {shown}{seconds:.0f} s)")
    if not waits:
        return f"waiting: {len(peers)} processes are up, none of them waits"
    return "waiting: " + "; ".join(waits[:8])


def plot_run(run_dir: Path) -> Path | None:
    """Draw `progress.png` in the run directory from metrics.jsonl.

    Returns:
        The path of the picture, or None if no step is committed yet.
    """
    steps = read_steps(run_dir / "metrics.jsonl")
    if not steps:
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    x = [line["step"] for line in steps]
    figure, (reward, lag) = pyplot.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 2))
    reward.plot(x, [line["reward_mean"] for line in steps], color="tab:blue")
    reward.set_ylabel("mean reward")
    reward.grid(alpha=0.3)
    lag.plot(x, [line["lag_mean"] for line in steps], color="tab:orange", label="mean lag of trained tokens")
    lag.step(
        x, [line["lag_max"] for line in steps], color="tab:red", alpha=0.6, where="mid", label="largest lag"
    )
    lag.set_ylabel("versions")
    lag.set_xlabel("step")
    lag.legend(loc="lower right", ncols=2)
    lag.grid(alpha=0.3)
    figure.tight_layout()
    path = run_dir / "progress.png"
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
