"""Counts sampled tokens by version in stored records with a second decoder, for `tether verify`.

`tether verify` proves the bound from the counts that each accept wrote into the log. The ingest computed
these counts from the record with `protocol.codec`. This module reads the stored bytes with the package
msgpack, `json` and `struct` instead, so it detects errors of the codec. Accepts do not count cancelled
samples; their number and tokens are compared with metrics.jsonl.
"""

import json
import sqlite3
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

MAX_VIOLATIONS = 1000
STEPS = "metrics.jsonl"
"""File with one line per committed step."""


@dataclass(frozen=True, slots=True)
class StoredTokens:
    """Result of comparing stored records with the accepts in the log."""

    records: int
    """Records whose accept is in the log."""
    tokens: int
    """Sampled tokens in these records."""
    cancelled_samples: int
    """Cancelled samples in these records."""
    cancelled_tokens: int
    """Tokens of the cancelled samples."""
    violations: tuple[str, ...]
    """Records that the second decoder cannot read, or whose tokens differ from their accept."""


def count_stored_tokens(run_dir: Path, log: Path) -> StoredTokens:
    """Compare the records in archive and spool with the accepts of an event log.

    A record without an accept in the log is skipped: its group was filtered, or is not accepted yet.
    """
    violations: list[str] = []
    stored: dict[tuple[int, str], tuple[str, Counter[int]]] = {}
    cancelled: dict[int, tuple[int, ...]] = {}
    for where, group, token, payload in _records(run_dir):
        try:
            stored[group, token] = where, tokens_by_version(payload, group, token)
            cancelled[group] = cancelled_tokens(payload)
        except (ValueError, KeyError, TypeError, struct.error, msgpack.UnpackException) as error:
            problem = f"msgpack cannot read its record under lease {token}: {error or type(error).__name__}"
            violations.append(f"{where}: group {group}: {problem}")
    records = tokens = 0
    for key, logged in _accepts(log):
        if (found := stored.pop(key, None)) is None:
            continue
        where, counts = found
        records, tokens = records + 1, tokens + counts.total()
        if counts != logged:
            violations.append(
                f"{where}: group {key[0]}: its record has {dict(counts)} sampled tokens by version, and its "
                f"accept has {dict(logged)}"
            )
    violations += _wrong_lines(run_dir, log, cancelled)
    all_cancelled = [n for lengths in cancelled.values() for n in lengths]
    return StoredTokens(
        records, tokens, len(all_cancelled), sum(all_cancelled), tuple(violations[:MAX_VIOLATIONS])
    )


def tokens_by_version(payload: bytes, group: int, token: str) -> Counter[int]:
    """Return version -> number of sampled tokens of an encoded `ScoredRollout`.

    Args:
        group: group under which the record is stored.
        token: lease token under which the record is stored.

    Raises:
        ValueError, KeyError, TypeError, struct.error, msgpack.UnpackException: the payload is not such a
            record.
    """
    rollout = msgpack.unpackb(payload, strict_map_key=False)["rollout"]
    if (rollout["group"], rollout["token"]) != (group, token):
        raise ValueError(f"it is of group {rollout['group']} and lease {rollout['token']}")
    mask = rollout["loss_mask"][2]
    counts: Counter[int] = Counter()
    first, before, row_before = 0, 0, -1  # span's first token, previous end and row
    for row, end, version in struct.iter_unpack("<iii", rollout["spans"][2]):
        length = end - before if row == row_before else end
        counts[version] += mask.count(1, first, first + length)
        first, before, row_before = first + length, end, row
    if first != len(mask):
        raise ValueError(f"its spans cover {first} of {len(mask)} tokens")
    return +counts


def cancelled_tokens(payload: bytes) -> tuple[int, ...]:
    """Return the tokens of each cancelled sample of an encoded `ScoredRollout`.

    Raises:
        Errors as in `tokens_by_version`.
    """
    found = msgpack.unpackb(payload, strict_map_key=False)["rollout"].get("cancelled")
    return struct.unpack(f"<{len(found[2]) // 4}i", found[2]) if found else ()


def _wrong_lines(run_dir: Path, log: Path, cancelled: Mapping[int, Sequence[int]]) -> Iterator[str]:
    """Yield a problem for each step whose line and stored batch differ in their cancelled samples."""
    # within an epoch, a step is taken once; a rewind starts a new epoch
    lines = {(line.get("step"), line.get("epoch")): line for line in _events(run_dir / STEPS, b'"epoch"')}
    for take in _events(log, b'"take"'):
        line = lines.get((take.get("step"), take.get("epoch"))) if take.get("event") == "take" else None
        if line is None or not cancelled.keys() >= set(take["groups"]):
            continue
        lengths = [n for group in take["groups"] for n in cancelled[group]]
        told = tuple(line.get(name) or 0 for name in ("cancelled_samples", "cancelled_tokens"))
        if told != (len(lengths), sum(lengths)):
            yield (
                f"step {take['step']}: its line has {told[0]} cancelled samples of {told[1]} tokens, and its "
                f"records have {len(lengths)} of {sum(lengths)}"
            )


def _events(file: Path, mark: bytes) -> Iterator[dict[str, Any]]:
    """Yield the readable lines of a JSON file that contain `mark`."""
    if file.is_file():
        with file.open("rb") as lines:
            for line in lines:
                if mark in line:
                    try:
                        event = json.loads(line)
                    except ValueError:  # `verify` reports the line
                        continue
                    yield event


def _records(run_dir: Path) -> Iterator[tuple[str, int, str, bytes]]:
    """Yield place, group, lease token and payload of each record; skips damaged files (see `check_files`)."""
    for path in sorted((run_dir / "archive").glob("step_*.msgpack")):
        try:
            step = msgpack.unpackb(path.read_bytes(), strict_map_key=False)
            found = [(item["group"], item["token"], item["payload"]) for item in step["records"]]
        except (OSError, ValueError, KeyError, TypeError, msgpack.UnpackException):
            continue
        yield from ((f"step {int(step['step'])}", *item) for item in found)
    path = run_dir / "spool.sqlite"
    if path.is_file():
        # The file of a finished run has no write-ahead log, and a reader must not create one.
        how = "mode=ro" if path.with_name("spool.sqlite-wal").exists() else "immutable=1"
        try:
            with closing(sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True)) as connection:
                for row in connection.execute("SELECT grp, token, payload FROM records"):
                    yield "spool", *row
        except sqlite3.Error:
            return


def _accepts(log: Path) -> Iterator[tuple[tuple[int, str], Mapping[int, int]]]:
    """Yield (group, lease token) and counts of each accept, including accepts in a rebuild."""
    for event in _events(log, b'"accept"'):
        yield from _accepts_in(event)


def _accepts_in(event: Any) -> Iterator[tuple[tuple[int, str], Mapping[int, int]]]:
    if isinstance(event, list):
        for item in event:
            yield from _accepts_in(item)
    elif isinstance(event, dict) and event.get("event") == "accept":
        counts = {int(version): int(n) for version, n in event["counts"].items() if n}
        yield (event["group"], event["token"]), counts
    elif isinstance(event, dict):
        for item in (event.get("told"), event.get("accepted")):
            yield from _accepts_in(item)
