"""Checks the calls of sessions: every trained token belongs to exactly one journalled call, and none is lost.

A tool's result is a call without tokens. The check reads the spool and the archive. For each group with calls
it compares the trained or waiting record with the journal.

A record that names no calls may follow calls of an earlier lease: recording was switched off, or the
environment changed. Such a record is compared only with the calls of its own lease. Undetected remains a
record that lost the names of calls which were all replayed from earlier leases, since it looks like a record
without recording.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.codec import decode_payload
from protocol.errors import ProtocolError, SpoolError
from protocol.messages import Call, Rollout, ScoredRollout
from protocol.rollout_view import RowView, check_logprobs, checked_array, decode_rollout
from services.observability.printable import printable
from trainer.storage.archive import Archive
from trainer.storage.call_store import CallStore
from trainer.storage.spool import Spool

MAX_VIOLATIONS = 1000


@dataclass(frozen=True, slots=True)
class CallAudit:
    """Result of comparing records with the journal of their calls."""

    calls: int
    """Number of compared journalled calls, without tool results."""
    tokens: int
    """Number of trained tokens that belong to a journalled call."""
    violations: tuple[str, ...] = ()
    """Contradictions to the journal; each message names group, sample and call."""
    results: int = 0
    """Number of journalled tool results."""


def audit_calls(run_dir: Path) -> CallAudit:
    """Compare all records on disk with the journal of their calls."""
    calls = results = tokens = 0
    violations: list[str] = []
    for where, payloads, journalled in _parts(run_dir, violations):
        by_group: dict[int, list[Call]] = {}
        for data in journalled:
            if (call := _call(data, where, violations)) is not None:
                by_group.setdefault(call.group, []).append(call)
        for data in payloads:
            try:
                message = decode_payload(data)
            except ProtocolError as error:
                violations.append(f"{where}: a record cannot be read: {error}")
                continue
            if isinstance(message, ScoredRollout):
                known = concerning(message.rollout, by_group.get(message.rollout.group, []))
                found, problems = check_group(message.rollout, known)
                calls, tokens = calls + sum(not call.name for call in known), tokens + found
                results += sum(bool(call.name) for call in known)
                violations += [f"{where}: {problem}" for problem in problems]
    return CallAudit(calls, tokens, tuple(violations[:MAX_VIOLATIONS]), results)


def concerning(rollout: Rollout, journalled: Sequence[Call]) -> list[Call]:
    """Return the journalled calls of its group that a record must match.

    These are all calls; for a record that names no calls, only the calls of its own lease, because earlier
    leases may have recorded calls that this lease did not replay. See the module docstring.
    """
    return [call for call in journalled if rollout.calls is not None or call.token == rollout.token]


def check_group(rollout: Rollout, journalled: Sequence[Call]) -> tuple[int, list[str]]:
    """Compare a record with the calls of its group.

    Returns:
        The number of its trained tokens that belong to a call, and the problems.
    """
    group, journalled = f"group {rollout.group}", concerning(rollout, journalled)
    if rollout.calls is None:
        return 0, [f"{group}: has {len(journalled)} journalled calls, but its record names none"] * bool(
            journalled
        )
    try:
        rows = decode_rollout(rollout).rows
        places = checked_array(rollout.group, "calls", rollout.calls, "int32", (None, 5)).tolist()
    except ProtocolError as error:
        return 0, [str(error)]
    check = _GroupCheck(group, rows, {(call.sample, call.number): call for call in journalled})
    for place in places:
        check.compare(*place)
    check.finish()
    return check.tokens, check.problems


class _GroupCheck:
    """Compares the calls that a record names with the journal, one by one."""

    def __init__(self, group: str, rows: Sequence[RowView], journalled: dict[tuple[int, int], Call]) -> None:
        self.problems: list[str] = []
        self.tokens = 0
        self._group, self._rows, self._journalled = group, rows, journalled
        self._seen_calls: set[tuple[int, int]] = set()
        self._attempts: dict[int, int] = {}
        """Sample -> attempt of the sample's calls."""
        self._coverage: list[NDArray[np.int32]] = [np.zeros(len(row.tokens), np.int32) for row in rows]

    def compare(self, sample: int, number: int, row: int, first: int, end: int) -> None:
        """Compare one call with the tokens that the record attributes to it."""
        name = f"{self._group}: call {number} of sample {sample}"
        if (sample, number) in self._seen_calls:
            self.problems.append(f"{name} is named twice")
        self._seen_calls.add((sample, number))
        if row == -1:
            return
        if not (0 <= row < len(self._rows) and 0 <= first < end <= len(self._rows[row].tokens)):
            self.problems.append(f"{name} is at tokens {first} to {end} of row {row}, which are not there")
            return
        self._coverage[row][first:end] += 1
        if (call := self._journalled.get((sample, number))) is None:
            self.problems.append(f"{name} is in the record, but was not journalled")
            return
        if call.name:
            self.problems.append(f"{name} is the result of a tool, and the record has tokens of it")
            return
        if self._attempts.setdefault(sample, call.attempt) != call.attempt:
            self.problems.append(f"{name} is of attempt {call.attempt}, others are of another")
        self._compare_tokens(name, call, self._rows[row], slice(first, end))

    def _compare_tokens(self, name: str, call: Call, row: RowView, place: slice) -> None:
        spans = call.spans.numpy()
        versions = np.repeat(spans[:, 1], np.diff(spans[:, 0], prepend=0))
        trained = row.sampled[place]
        if trained.any() != trained.all():
            self.problems.append(f"{name}: only some of its tokens are trained")
        if call.sampling and trained.any():
            self.problems.append(f"{name} was generated with {printable(call.sampling)} and is trained")
        pairs: list[tuple[str, NDArray[Any], NDArray[Any]]] = [
            ("tokens", call.tokens.numpy(), row.tokens),
            ("versions", versions, row.versions),
        ]
        if trained.any():
            self.tokens += int(trained.sum())
            pairs.append(("log-probabilities", call.logprobs.numpy(), row.logprobs))
        for what, journalled, found in pairs:
            if not np.array_equal(journalled, found[place]):
                self.problems.append(f"{name}: {what} of the record are not those of the journal")

    def finish(self) -> None:
        """Check that each trained token belongs to one call, and no call of a trained attempt is lost."""
        for index, (row, covered) in enumerate(zip(self._rows, self._coverage, strict=True)):
            for wrong, problem in (
                (row.sampled & (covered == 0), "of no journalled call"),
                (covered > 1, "of two calls"),
            ):
                if wrong.any():
                    at = int(wrong.argmax())
                    self.problems.append(f"{self._group}: token {at} of row {index} is {problem}")
        for (sample, number), call in self._journalled.items():
            if self._attempts.get(sample) == call.attempt and (sample, number) not in self._seen_calls:
                what = f"result '{printable(call.name)}'" if call.name else f"call {number}"
                self.problems.append(f"{self._group}: {what} of sample {sample} is lost")


def calls_of_group(run_dir: Path, group: int) -> list[Call]:
    """Return the journalled calls of a group from spool and archive, ordered by sample and number."""
    calls_in_group: list[Call] = []
    problems: list[str] = []
    for where, _, journalled in _parts(run_dir, problems):
        calls = [_call(data, where, problems) for data in journalled]
        calls_in_group += [call for call in calls if call is not None and call.group == group]
    return sorted(calls_in_group, key=lambda call: (call.sample, call.number))


def call_facts(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """Return the data of `render_calls` as JSON types; a result has its name and the size of its JSON."""
    return [
        {
            "event": _kind(call),
            **({"name": call.name, "bytes": len(call.result)} if call.name else {}),
            "sample": call.sample,
            "number": call.number,
            "parent": call.parent,
            "attempt": call.attempt,
            "tokens": call.tokens.shape[0],
            "versions": _versions(call),
            **({"sampling": call.sampling} if call.sampling else {}),
            "engine": call.engine,
            "token": call.token,
            "began_ms": call.began_ms,
            "ended_ms": call.ended_ms,
        }
        for call in calls
    ]


def render_calls(calls: Sequence[Call]) -> str:
    """Format the journalled calls of a group, one line each; empty without calls."""
    return "".join(
        f"{_clock(call.began_ms)}  +{(call.ended_ms - call.began_ms) / 1e3:.3f} s  {_kind(call):<8} "
        f"sample {call.sample}  number {call.number}  {_details(call)}  engine {printable(call.engine)}  "
        f"token {printable(call.token)}\n"
        for call in calls
    )


def _kind(call: Call) -> str:
    return "result" if call.name else "call"


def _details(call: Call) -> str:
    """Format the fields that only calls or only results have."""
    if call.name:
        return f"attempt {call.attempt}  bytes {len(call.result)}  name '{printable(call.name)}'"
    versions = ",".join(map(str, _versions(call)))
    own = f"  sampling {printable(call.sampling)}" if call.sampling else ""
    tokens = call.tokens.shape[0]
    return f"after {call.parent}  attempt {call.attempt}  tokens {tokens}  versions {versions}{own}"


def _call(data: bytes, where: str, violations: list[str]) -> Call | None:
    """Decode a journalled call and check its arrays; report a damaged call and return None."""
    try:
        call = decode_payload(data)
        if not isinstance(call, Call):
            raise ProtocolError(f"is a {type(call).__name__}")
        if call.name:
            return call
        group, count = call.group, len(checked_array(call.group, "tokens", call.tokens, "int32", (None,)))
        logprobs = checked_array(group, "logprobs", call.logprobs, "float32", (count,))
        sample = call.sample
        check_logprobs(group, logprobs, lambda _: sample)
        spans = checked_array(group, "spans", call.spans, "int32", (None, 2))
        if not len(spans) or spans[-1, 0] != count or (np.diff(spans[:, 0], prepend=0) <= 0).any():
            raise ProtocolError(f"group {group}: spans of call {call.number} do not cover its tokens")
    except ProtocolError as error:
        violations.append(f"{where}: a journalled call cannot be read: {error}")
        return None
    return call


def _parts(run_dir: Path, violations: list[str]) -> Iterator[tuple[str, Iterable[bytes], Iterable[bytes]]]:
    """Yield the records and calls of each archived step, then of the spool."""
    archive = Archive(run_dir / "archive")
    archived: set[int] = set()
    for step in archive.steps():
        try:
            part = archive.read(step)
        except SpoolError as error:
            violations.append(str(error))
            continue
        archived |= {record.group for record in part.records}
        records, calls = ([item.payload for item in items] for items in (part.records, part.calls))
        yield f"step {step}", records, calls
    path = run_dir / "spool.sqlite"
    if path.is_file():
        try:
            with closing(Spool(path, read_only=True)) as spool:
                yield "spool", *read_spool(spool, CallStore(spool), archived)
        except SpoolError as error:
            violations.append(str(error))


def read_spool(spool: Spool, store: CallStore, archived: Set[int]) -> tuple[list[bytes], list[bytes]]:
    """Return records and calls of the groups that are not archived.

    A record that the trainer forgets during the read is skipped, because its calls are deleted with it.
    """
    records = {
        group: payload
        for group in store.record_groups()
        if group not in archived
        for payload in spool.find([group])
    }
    calls = [call.payload for call in store.group_calls({*records, *store.groups()} - archived)]
    kept = set(store.record_groups())
    return [payload for group, payload in records.items() if group in kept], calls


def _versions(call: Call) -> list[int]:
    return sorted({int(version) for version in call.spans.numpy().reshape(-1, 2)[:, 1]})


def _clock(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1e3, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
