"""Writes and reads eval.jsonl, which has one line for each version and held-out set that was scored."""

import math
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from services.ledger.event_log.hash_chain import append
from services.run_record.lines import LineFollower, read_parsed
from services.run_record.steps import FILE as STEPS
from services.run_record.steps import epoch_starts

FILE = "eval.jsonl"
"""In the run directory."""
BEST = "exports/best.json"
"""Names the best version."""
SNAPSHOTS = "evaluation"
"""Folder of the run directory with the versions that are to be scored; a version leaves it when it is."""
LEFT_OUT = "left_out"
"""File in a version's folder there: the version could not be staged, and is tried at the next start."""
MAX_ROWS = 4000
"""Newest lines of eval.jsonl that the page shows."""
FALL_ERRORS = 3.0
"""Standard errors of a difference that the newest score may be under the best one without a warning."""
MAX_SCORE = 1e100
"""Scores that are not below this are not drawn."""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """Scores of one version on one held-out set. A number that was not measured is None."""

    version: int
    step: int | None = None
    """The step that made the version; None for version 0."""
    epoch: str = ""
    """Epoch of the trainer that published the version."""
    digest: str = ""
    """Digest of the version's weight manifest, 16 hex digits: the weights that were scored."""
    set: str
    n: int = 0
    """Prompts that were scored, greedy and sampled; every mean is over these."""
    failed: int = 0
    """Prompts that could not be generated or scored, greedy or sampled; they are in no mean."""
    error: str = ""
    """Why the first failed prompt failed."""
    samples: int = 0
    """Sampled answers to each prompt."""
    greedy: float | None = None
    """Mean reward of the greedy answers."""
    greedy_stderr: float | None = None
    sampled: float | None = None
    """Mean reward of the sampled answers."""
    sampled_stderr: float | None = None
    pass_at_k: dict[int, float] = {}
    """k -> estimated share of prompts that k sampled answers solve."""
    pass_at_k_stderr: dict[int, float | None] = {}
    length: float | None = None
    """Mean tokens of a greedy answer."""
    truncated: float | None = None
    """Share of greedy answers that the token limit ended."""
    sampled_length: float | None = None
    sampled_truncated: float | None = None
    tokens: float | None = None
    """Mean tokens of a greedy answer that the model sampled; the rest is what an environment inserted."""
    prompt_s: float | None = None
    """Mean time of a greedy answer, its episode included; of the sampled ones, until the last had ended."""
    sampled_tokens: float | None = None
    sampled_prompt_s: float | None = None
    engine: str = ""
    """Kind of the engine that generated."""
    seconds: float = 0.0
    """Wall-clock time of generating and scoring."""
    time: float = 0.0
    """Unix time at the end, seconds."""

    @property
    def key(self) -> tuple[int, str, str]:
        """Identity of the scores: version, digest of its weights, set."""
        return (self.version, self.digest, self.set)

    def score(self, metric: str) -> tuple[float | None, float | None]:
        """Return the value and the standard error of greedy, sampled or pass@K; None if not measured."""
        if metric.startswith("pass@"):
            k = int(metric.removeprefix("pass@"))
            return self.pass_at_k.get(k), self.pass_at_k_stderr.get(k)
        return getattr(self, metric), getattr(self, f"{metric}_stderr")


_DECODER = msgspec.json.Decoder(Evaluation)


def append_evaluation(run_dir: Path, evaluation: Evaluation) -> None:
    """Write one line, linked to the one before it, and sync it to the disk. Raises OSError."""
    append(run_dir / FILE, [msgspec.json.encode(evaluation)])


def read_evaluations(run_dir: Path) -> Iterator[Evaluation]:
    """Yield every line of eval.jsonl, oldest first; incomplete lines are skipped."""
    return read_parsed(run_dir / FILE, parse_evaluation)


def parse_evaluation(line: bytes) -> Evaluation | None:
    """Return a line of eval.jsonl; None if it is incomplete or anything else."""
    try:
        return _DECODER.decode(line)
    except (ValueError, RecursionError):  # a MsgspecError is a ValueError
        return None


def last_lines(evaluations: Iterable[Evaluation]) -> list[Evaluation]:
    """Return the last line of each version and set: after a rewind a version has other weights."""
    by_key: dict[tuple[int, str], Evaluation] = {}
    for row in evaluations:
        by_key.pop((row.version, row.set), None)
        by_key[row.version, row.set] = row
    return list(by_key.values())


def counted_evaluations(run_dir: Path, *new: Evaluation) -> list[Evaluation]:
    """Return the last line of each version and set, but for versions that a rewind has abandoned.

    A version is abandoned where metrics.jsonl proves it: a trainer of a later epoch began before it. A rewind
    shows there with its first step, not earlier.

    Args:
        run_dir: of the run.
        new: lines that are not written yet.
    """
    rows = [*read_evaluations(run_dir), *new]
    newest_kept: dict[str, int] = {}
    if len({row.epoch for row in rows}) > 1:
        first_steps: list[int] = []
        for epoch, step in reversed(epoch_starts(run_dir / STEPS).items()):
            if first_steps:
                newest_kept[epoch] = min(first_steps)
            first_steps.append(step)
    return last_lines(row for row in rows if row.version <= newest_kept.get(row.epoch, row.version))


def latest_evaluations(run_dir: Path) -> list[Evaluation]:
    """Return the last line of each set of the version that was scored last; empty if none was."""
    found = list(read_evaluations(run_dir))
    return list({e.set: e for e in found if e.version == found[-1].version}.values()) if found else []


def due_versions(every: int, first: int, last: int) -> list[int]:
    """Return the versions from `first` to `last` that are scored: multiples of `every`, and the last one."""
    return sorted({version for version in range(first, last + 1) if version % every == 0} | {last})


def unscored_versions(evaluations: Iterable[Evaluation], due: Sequence[int]) -> list[int]:
    """Return the due versions that lack the scores of a set that another version has."""
    rows = list(evaluations)
    sets = {row.set for row in rows}
    scored = {(row.version, row.set) for row in rows}
    return [v for v in due if not sets or any((v, name) not in scored for name in sets)]


def describe_scores(evaluation: Evaluation) -> list[str]:
    """Return the scores, each with its standard error, as text."""
    return [
        f"{metric} {value:.3f}" + ("" if stderr is None else f" ± {stderr:.3f}")
        for metric in ("greedy", "sampled", *(f"pass@{k}" for k in evaluation.pass_at_k if k > 1))
        for value, stderr in [evaluation.score(metric)]
        if value is not None
    ]


def fallen_scores(run_dir: Path) -> list[tuple[Evaluation, str]]:
    """Return the newest line of each set whose score is far under the set's best, with a sentence about it.

    Far is more than `FALL_ERRORS` standard errors of the difference, greedy or sampled. Scores without a
    standard error, and versions that a rewind has abandoned, are not compared.
    """
    by_set: dict[str, list[Evaluation]] = {}
    for row in sorted(counted_evaluations(run_dir), key=lambda row: row.version):
        by_set.setdefault(row.set, []).append(row)
    found = [(rows[-1], _fall(rows, metric)) for rows in by_set.values() for metric in ("greedy", "sampled")]
    # of a set that fell by both scores the last sentence replaces the one before
    return list({row.set: (row, text) for row, text in found if text}.values())


def _fall(rows: Sequence[Evaluation], metric: str) -> str:
    """Return a sentence if the last of `rows` is far under the best of them, else nothing."""
    *earlier, (newest, value, error) = [(row, *row.score(metric)) for row in rows]
    measured = [(v, row, e) for row, v, e in earlier if v is not None and e is not None]
    if value is None or error is None or not measured:
        return ""
    high, best, best_error = max(measured, key=lambda item: item[0])
    if high - value <= FALL_ERRORS * math.hypot(error, best_error):
        return ""
    return (
        f"{newest.set} has fallen: {metric} {value:.3f} ± {error:.3f} at version {newest.version}, its best "
        f"is {high:.3f} ± {best_error:.3f} at version {best.version}; read samples for what the reward "
        "pays for, and lower optimizer.lr or bound.max_staleness"
    )


def describe_evaluation(evaluation: Evaluation) -> str:
    """Return one line for people."""
    counts = f"{evaluation.n} prompts" + (
        f", {evaluation.failed} not scored ({evaluation.error})" if evaluation.failed else ""
    )
    return (
        f"evaluation of version {evaluation.version} on {evaluation.set}: "
        f"{', '.join([*describe_scores(evaluation), counts])}, {evaluation.seconds:.1f} s"
    )


def evaluation_facts(run_dir: Path) -> dict[str, Any] | None:
    """Return the newest scores, the best version and warnings as JSON types; None without any score."""
    latest = latest_evaluations(run_dir)
    if not latest:
        return None
    try:
        best = msgspec.json.decode((run_dir / BEST).read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError):
        best = None
    rows = [msgspec.to_builtins(found, str_keys=True) for found in latest]
    return {"latest": rows, "best": best, "warnings": [text for _, text in fallen_scores(run_dir)]}


def render_facts(facts: dict[str, Any] | None) -> str:
    """Return the result of `evaluation_facts` as further lines, each after a line break."""
    if facts is None:
        return ""
    latest = msgspec.convert(facts["latest"], list[Evaluation], str_keys=True)
    lines = [describe_evaluation(evaluation) for evaluation in latest]
    if best := facts["best"]:
        lines.append(
            f"best: version {best['version']}, {best['set']} {best['metric']} {best['score']:.3f}, "
            f"in exports/{best['directory']}"
        )
    lines += [f"warning: {text}" for text in facts["warnings"]]
    return "".join(f"\n{line}" for line in lines)


class ScoredVersions:
    """The newest lines of eval.jsonl as points of the page, each at the step that made the version.

    Methods block for a moment and may be called from any thread.
    """

    def __init__(self, run_dir: Path) -> None:
        """Store the arguments; the file need not exist."""
        self._follower = LineFollower(run_dir / FILE)
        self._lock = threading.Lock()
        self._starts = 0
        self._rows: deque[dict[str, Any]] = deque(maxlen=MAX_ROWS)
        self._count = 0
        """Evaluations read so far, also the ones that `_rows` no longer holds."""
        self._fallen: tuple[int, list[tuple[Evaluation, str]]] = (0, [])
        """What `fallen_scores` said when there were so many evaluations."""

    def since(self, after: int) -> dict[str, Any]:
        """Return the lines after the first `after` ones, for `/evaluations.json`.

        Returns:
            `rows` (step, set and scores), `last` to ask with next, `reset` (whether the reader has to forget
            what it has, because the file was replaced).
        """
        with self._lock:
            self._read_more()
            reset = after > self._count
            forgotten = self._count - len(self._rows)
            rows = list(self._rows)[0 if reset else max(0, after - forgotten) :]
            return {"rows": rows, "last": self._count, "reset": reset}

    def fallen(self) -> list[tuple[Evaluation, str]]:
        """Return what `fallen_scores` says; the files are read again only once there is a new line."""
        with self._lock:
            self._read_more()
            if self._fallen[0] != self._count:
                self._fallen = (self._count, fallen_scores(self._follower.path.parent))
            return self._fallen[1]

    def _read_more(self) -> None:
        lines = self._follower.read_rest()
        if self._follower.starts != self._starts or not self._follower.path.exists():
            self._starts, self._count = self._follower.starts, 0
            self._rows.clear()
        rows = [_row(found) for line in lines if (found := parse_evaluation(line.data))]
        self._rows.extend(rows)
        self._count += len(rows)


def _row(evaluation: Evaluation) -> dict[str, Any]:
    scores = {"greedy": evaluation.greedy, "sampled": evaluation.sampled}
    return {
        "step": max(evaluation.version - 1, 0),
        "set": evaluation.set,
        **{name: v for name, v in scores.items() if v is not None and -MAX_SCORE < v < MAX_SCORE},
    }
