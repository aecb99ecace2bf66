"""Prints and plots the progress of `tether up`: steps, evaluations, failed scores, long waits."""

import asyncio
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from protocol.errors import TetherError
from protocol.host.full_disk import describe_full, is_full
from protocol.topics import Role
from services.ledger.interface import Ledger, LedgerStatus, Peer
from services.observability.bottleneck import PartTimes
from services.observability.printable import printable, without_numbers
from services.observability.service_rows import (
    MISSING,
    ROOM,
    STARTS,
    ServiceRow,
    Supervised,
    scaled_to_zero,
    service_rows,
)
from services.observability.start_parts import describe_start
from services.run_record.evaluations import FILE as EVALUATIONS
from services.run_record.evaluations import describe_evaluation, fallen_scores, parse_evaluation
from services.run_record.halts import explain_drops
from services.run_record.lines import LineFollower
from services.run_record.steps import FILE, count_skipped, parse_line, read_steps

POLL_S = 0.5
MAX_ROWS = 8
"""Maximum number of processes named in a line."""
QUIET_S = 15.0
"""Seconds without a step after which waits are printed."""
FAILED = "failed"
"""Registry entry of a reward worker with its last failure, such as "function: /x/my_reward.py:12: ..."."""
FAILURES_S = 1.0
"""Seconds between two reads of the reward workers' failures."""
MAX_FAILURES = 20
"""Maximum number of different failures that are reported."""


class Progress:
    """Prints the steps of a run to a stream."""

    def __init__(self, run_dir: Path, steps: int, out: TextIO = sys.stdout) -> None:
        self._run_dir, self._steps, self._out = run_dir, steps, out
        self._last = time.monotonic()
        self._follower = LineFollower(run_dir / FILE)
        self._version = 0
        self._new_steps()  # skips steps of an earlier start
        self._has_stepped = False
        """Whether this start has made a step."""
        self._began = time.monotonic()
        self._evaluations = LineFollower(run_dir / EVALUATIONS)
        self._evaluations.read_rest()
        self._is_stopping = False
        self.is_on = False
        """Whether the run was created or resumed; no setting is refused afterwards."""
        self._full = ""
        """Sentence about a full disk at the last check; empty if no disk was full."""

    def note(self, text: str) -> None:
        """Print a line unless it is empty."""
        if text:
            print(printable(text), file=self._out, flush=True)

    async def watch_loop(self, ledger: Ledger, children: Mapping[Any, Sequence[Supervised]]) -> None:
        """Print the URL of the monitor's page, new steps and long waits, until cancelled."""
        page, is_reported, prepared_s = "", False, time.monotonic() - self._began
        while True:
            peers = await answering_peers(ledger)
            if not page:
                page = page_of(peers)
                self.note(f"page {page}" if page else "")
            self._print_steps(sum(child.restarts for group in children.values() for child in group))
            self._print_evaluations()
            await self._print_disk(peers)
            if self._has_stepped and peers and not is_reported:
                is_reported = True
                self.note(describe_start(peers, prepared_s, time.monotonic() - self._began))
            if time.monotonic() - self._last > QUIET_S:
                self._last = time.monotonic()
                self.note(await self._describe_quiet(ledger, children))
            await asyncio.sleep(POLL_S)

    def print_last(self) -> None:
        """Print steps and evaluations between the last poll and the end of the run."""
        self._print_steps(0)
        self._print_evaluations()

    def finish(self, status: LedgerStatus) -> None:
        """Print the last steps and a summary of the run's end."""
        self.print_last()
        steps = read_steps(self._run_dir / FILE)
        skipped = count_skipped(steps)
        without = f" (but for {skipped}, which changed no weights)" if skipped.steps else ""
        self.note(
            f"{'done' if status.done else 'stopped'} at version {status.version} of {status.steps} "
            f"after {time.monotonic() - self._began:.0f} s: "
            f"{status.trained} groups trained{without}, {status.dropped} dropped, {status.active} in flight"
        )
        for line in (*explain_drops(status.dropped_by_reason), PartTimes(steps).bottleneck()):
            self.note(line)
        newest = max((self._run_dir / "exports").glob("step_*"), default=None)
        model = f"; the model is {newest}" if newest else ""
        self.note(f"see it with `tether monitor {shlex.quote(str(self._run_dir))}`{model}")

    def _print_evaluations(self) -> None:
        for line in self._evaluations.read_rest():
            if (evaluation := parse_evaluation(line.data)) is not None:
                self.note(describe_evaluation(evaluation))
                fallen = fallen_scores(self._run_dir)
                self.note("\n".join(f"warning: {text}" for row, text in fallen if row == evaluation))

    def say_stopping(self, at_once: bool) -> None:
        """Report that a signal ends the run, at once or after the groups in flight."""
        self._is_stopping = True
        if at_once:
            self.note(
                "stopping now: all processes are killed; the run can continue from its last committed step"
            )
        else:
            self.note("draining: finishing what is in flight; Ctrl-C again to stop now")

    @property
    def is_full(self) -> bool:
        """Whether the disk of the run directory was full at the last check."""
        return self._full == describe_full(self._run_dir)

    async def _print_disk(self, peers: Sequence[Peer]) -> None:
        """Report when the disk of the run directory, or of a waiting process, becomes full or has room."""
        own = describe_full(self._run_dir)
        full = own if await asyncio.to_thread(is_full, self._run_dir) else awaited_room(peers)
        if full and full != self._full:
            self.note(f"{full}: the run waits until there is room")
        elif self._full and not full:
            self.note(f"{self._full.removesuffix(' is full')} has room again")
        self._full = full

    async def _describe_quiet(self, ledger: Ledger, children: Mapping[Any, Sequence[Supervised]]) -> str:
        # at the end of a run an unregistered process has ended; it is not starting
        ends = self._is_stopping or self._version >= self._steps
        return await describe_waits(ledger, {} if ends else children)

    def _print_steps(self, restarts: int) -> None:
        for line in self._new_steps():
            self.note(describe_step(line, self._steps, restarts))
            for warning in line.get("warnings", ()):
                self.note(f"warning: {warning}")

    def _new_steps(self) -> list[dict[str, Any]]:
        """Return the new lines of metrics.jsonl; after a rewind steps appear again."""
        rest = self._follower.read_rest()
        new_lines = [line for item in rest if (line := parse_line(item.data)) is not None]
        if new_lines:
            self._last = time.monotonic()
            self._has_stepped = True
            self._version = new_lines[-1]["step"] + 1
        return new_lines


async def report_failures_loop(ledger: Ledger, report: Callable[[str], None]) -> None:
    """Report each kind of failed score once, until cancelled; numbers in the text do not matter."""
    reported: set[str] = set()
    while True:
        for peer in await answering_peers(ledger, Role.REWARD):
            text = str(peer.info.get(FAILED, ""))
            kind = without_numbers(text)
            if text and kind not in reported and len(reported) < MAX_FAILURES:
                reported.add(kind)
                report(
                    f"{peer.info.get('name', peer.role)} could not score a group: {text} (it is tried again, "
                    "and dropped after bound.max_attempts)"
                )
        await asyncio.sleep(FAILURES_S)


async def answering_peers(ledger: Ledger, role: Role | None = None) -> Sequence[Peer]:
    """Return the registered processes; none while the ledger does not answer."""
    try:
        return await ledger.peers(role)
    except TetherError:
        return ()


def page_of(peers: Iterable[Peer]) -> str:
    """Return the URL of the monitor's page; empty without a page."""
    return next((str(peer.info["page"]) for peer in peers if "page" in peer.info), "")


def awaited_room(peers: Iterable[Peer]) -> str:
    """Return the sentence about a full disk for which a process waits; empty without one."""
    waits = (what for peer in peers for what in peer.info.get("waits", {}))
    return next((what.removeprefix(f"{ROOM}: ") for what in waits if what.startswith(ROOM)), "")


async def describe_waits(ledger: Ledger, children: Mapping[Any, Sequence[Supervised]] | None = None) -> str:
    """Return one line with the work or wait of each process, and its duration.

    Args:
        ledger: ledger of the run.
        children: expected processes by role; unregistered ones are named, and roles without a process.
    """
    try:
        peers = await ledger.peers()
    except TetherError as error:
        return f"waiting: the ledger does not answer ({error})"
    rows = [row for row in service_rows(peers, expected_processes(children or {})) if _is_shown(row)]
    shown = [*scaled_to_zero(peers, children or {}), *(row.sentence() for row in rows)]
    if not shown:
        return "waiting: no process waits for another one"
    more = f"; and {len(shown) - MAX_ROWS} more" if len(shown) > MAX_ROWS else ""
    return "waiting: " + "; ".join(shown[:MAX_ROWS]) + more


def expected_processes(children: Mapping[Any, Sequence[Supervised]]) -> dict[str, int]:
    """Return the names of supervised processes -> number of restarts."""
    return {child.name: child.restarts for group in children.values() for child in group if child.registers}


def _is_shown(row: ServiceRow) -> bool:
    """Return whether a row explains missing steps: long work or waits, or a missing process."""
    return row.state in (STARTS, MISSING) or (row.seconds or 0) >= 1


def describe_step(line: Mapping[str, Any], steps: int, restarts: int) -> str:
    """Format a step as a line; unmeasured numbers are dashes."""
    rate = token_rate(line)
    return (
        f"version {line['version']:>4}/{steps}  reward {number(line, 'reward_mean', '6.3f')}  "
        f"lag {number(line, 'lag_mean', '.2f')} max {number(line, 'lag_max', 'd')}  "
        f"{'-' if rate is None else f'{rate:.0f}':>8} tokens/s  "
        f"wait {number(line, 'wait_s', '.2f')} s  train {number(line, 'train_s', '.2f')} s  "
        f"publish {number(line, 'publish_s', '.2f')} s"
        + (
            f"  checkpoint {number(line, 'checkpoint_s', '.2f')} s"
            if (line.get("checkpoint_s") or 0) >= 0.005
            else ""
        )
        + (f"  MFU {number(line, 'mfu', '.1%')}" if line.get("mfu") else "")
        + (f"  restarts {restarts}" if restarts else "")
        + (f"  SKIPPED, no weight changed: {line['skipped']}" if line.get("skipped") else "")
    )


def number(line: Mapping[str, Any], name: str, form: str) -> str:
    """Format a number in a step's line; a dash if it was not measured."""
    value = line.get(name)
    return format(value, form) if isinstance(value, (int, float)) else "-"


def token_rate(line: Mapping[str, Any]) -> float | None:
    """Return the trained tokens per second of a step, including waits; None if unknown."""
    seconds, tokens = line.get("step_s") or 0.0, line.get("trained_tokens")
    return tokens / seconds if isinstance(tokens, (int, float)) and seconds >= 1e-3 else None


def plot_run(run_dir: Path) -> Path | None:
    """Plot metrics.jsonl to `progress.png` in the run directory.

    Returns:
        The path of the picture; None if no step is committed yet.
    """
    steps = read_steps(run_dir / FILE)
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
