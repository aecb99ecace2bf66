"""Writes and reads eval.jsonl, with one line for each scored version and held-out set."""

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
"""Name of the file in the run directory."""
BEST = "exports/best.json"
"""File with the best version."""
SNAPSHOTS = "evaluation"
"""Directory in the run directory with the versions to be scored; scored versions are removed."""
SKIP_MARK = "left_out"
"""Marker file of a version that could not be staged; the next start retries it."""
MAX_ROWS = 4000
"""Number of newest lines of eval.jsonl shown on the page."""
FALL_ERRORS = 3.0
"""Standard errors of the difference by which the newest score may be below the best without a warning."""
MAX_SCORE = 1e100
"""Exclusive limit of the absolute scores that are drawn."""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """Scores of one version on one held-out set. Unmeasured numbers are None."""

    version: int
    step: int | None = None
    """Step that made the version; None for version 0."""
    epoch: str = ""
    """Epoch of the trainer that published the version."""
    digest: str = ""
    """Digest of the scored version's weight manifest, 16 hex digits."""
    set: str
    n: int = 0
    """Number of prompts that were scored, greedy and sampled; the base of every mean."""
    failed: int = 0
    """Number of prompts that could not be generated or scored, excluded from every mean."""
    error: str = ""
    """Error of the first failed prompt."""
    samples: int = 0
    """Number of sampled answers per prompt."""
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
    """Mean number of tokens in a greedy answer."""
    truncated: float | None = None
    """Share of greedy answers that were truncated at the token limit."""
    sampled_length: float | None = None
    sampled_truncated: float | None = None
    tokens: float | None = None
    """Mean number of tokens sampled by the model in a greedy answer; an environment inserts the others."""
    prompt_s: float | None = None
    """Mean seconds of a greedy answer, including its episode; for sampled answers, until the last one
    ends."""
    sampled_tokens: float | None = None
    sampled_prompt_s: float | None = None
    engine: str = ""
    """Name of the engine that generated the answers."""
    seconds: float = 0.0
    """Wall-clock time of generation and scoring."""
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
    """Append one line, linked to the previous line, and sync it to disk. Raises OSError."""
    append(run_dir / FILE, [msgspec.json.encode(evaluation)])


def read_evaluations(run_dir: Path) -> Iterator[Evaluation]:
    """Yield every line of eval.jsonl, oldest first; incomplete lines are skipped."""
    return read_parsed(run_dir / FILE, parse_evaluation)


def parse_evaluation(line: bytes) -> Evaluation | None:
    """Parse a line of eval.jsonl; return None for incomplete and other lines."""
    try:
        return _DECODER.decode(line)
    except (ValueError, RecursionError):  # a MsgspecError is a ValueError
        return None


def last_lines(evaluations: Iterable[Evaluation]) -> list[Evaluation]:
    """Return the last line of each version and set; after a rewind a version has other weights."""
    by_key: dict[tuple[int, str], Evaluation] = {}
    for row in evaluations:
        by_key.pop((row.version, row.set), None)
        by_key[row.version, row.set] = row
    return list(by_key.values())


def counted_evaluations(run_dir: Path, *new: Evaluation) -> list[Evaluation]:
    """Return the last line of each version and set, without versions that a rewind abandoned.

    A version is abandoned if a trainer of a later epoch began before it according to metrics.jsonl. A rewind
    appears there with its first step.

    Args:
        run_dir: directory of the run.
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
    """Return the last line of each set for the newest version that counts; empty without scores."""
    found = counted_evaluations(run_dir)  # the evaluator may have scored older versions later
    newest = max((row.version for row in found), default=None)
    return [row for row in found if row.version == newest]


def due_versions(interval: int, first: int, last: int) -> list[int]:
    """Return the versions from `first` to `last` to be scored: multiples of `interval`, and `last`."""
    return sorted({version for version in range(first, last + 1) if version % interval == 0} | {last})


def unscored_versions(evaluations: Iterable[Evaluation], due: Sequence[int]) -> list[int]:
    """Return the due versions without a score on a set that has scores of other versions."""
    rows = list(evaluations)
    sets = {row.set for row in rows}
    scored = {(row.version, row.set) for row in rows}
    return [v for v in due if not sets or any((v, name) not in scored for name in sets)]


def describe_scores(evaluation: Evaluation) -> list[str]:
    """Format the scores with their standard errors."""
    return [
        f"{metric} {value:.3f}" + ("" if stderr is None else f" ± {stderr:.3f}")
        for metric in ("greedy", "sampled", *(f"pass@{k}" for k in evaluation.pass_at_k if k > 1))
        for value, stderr in [evaluation.score(metric)]
        if value is not None
    ]


def fallen_scores(run_dir: Path) -> list[tuple[Evaluation, str]]:
    """Return the newest line of each set whose score fell far below the set's best, with a sentence.

    Far means more than `FALL_ERRORS` standard errors of the difference, greedy or sampled. Scores without a
    standard error and abandoned versions are not compared.
    """
    by_set: dict[str, list[Evaluation]] = {}
    for row in sorted(counted_evaluations(run_dir), key=lambda row: row.version):
        by_set.setdefault(row.set, []).append(row)
    found = [(rows[-1], _fall(rows, metric)) for rows in by_set.values() for metric in ("greedy", "sampled")]
    # if both scores of a set fell, the last sentence is kept
    return list({row.set: (row, text) for row, text in found if text}.values())


def _fall(rows: Sequence[Evaluation], metric: str) -> str:
    """Return a sentence if the last of `rows` is far below the best one; else an empty string."""
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
    """Format an evaluation as one line."""
    counts = f"{evaluation.n} prompts" + (
        f", {evaluation.failed} not scored ({evaluation.error})" if evaluation.failed else ""
    )
    return (
        f"evaluation of version {evaluation.version} on {evaluation.set}: "
        f"{', '.join([*describe_scores(evaluation), counts])}, {evaluation.seconds:.1f} s"
    )


def evaluation_facts(run_dir: Path) -> dict[str, Any] | None:
    """Return the newest scores, the best version and warnings as JSON types; None without scores."""
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
    """Format the result of `evaluation_facts` as lines, each after a line break."""
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
    """Newest lines of eval.jsonl as points of the page, each at the step that made its version.

    Methods block briefly and are thread-safe.
    """

    def __init__(self, run_dir: Path) -> None:
        """Store the arguments; the file need not exist."""
        self._follower = LineFollower(run_dir / FILE)
        self._lock = threading.Lock()
        self._starts = 0
        self._rows: deque[dict[str, Any]] = deque(maxlen=MAX_ROWS)
        self._count = 0
        """Number of evaluations read so far, including those that `_rows` has dropped."""
        self._fallen: tuple[int, list[tuple[Evaluation, str]]] = (0, [])
        """Number of evaluations, and the result of `fallen_scores` at that number."""

    def since(self, after: int) -> dict[str, Any]:
        """Return the lines after the first `after` lines, for `/evaluations.json`.

        Returns:
            `rows` (step, set and scores), `last` (the next request's `after`), `reset` (whether the reader
            must discard its rows, because the file was replaced).
        """
        with self._lock:
            self._read_more()
            reset = after > self._count
            forgotten = self._count - len(self._rows)
            rows = list(self._rows)[0 if reset else max(0, after - forgotten) :]
            return {"rows": rows, "last": self._count, "reset": reset}

    def fallen(self) -> list[tuple[Evaluation, str]]:
        """Return the result of `fallen_scores`, computed again only after a new line."""
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
