"""Fuzzes decoders of what is read back: from the ledger, the run directory and child processes."""

import contextlib
import functools
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from protocol.errors import ProtocolError, SettingsError, SpoolError, TetherError
from reward.sandbox.runner import KINDS, parse_report
from services.ledger.embedded_server import read_endpoint
from services.ledger.event_log.archiver import last_sequence
from services.ledger.interface import Lease, StepRecord, TakenBatch
from services.ledger.redis import json_codec
from services.ledger.verify.verifier import verify
from services.run_record.steps import read_steps
from tests.trials.fuzz.target import Form, Target
from trainer.storage.checkpoints import Checkpoints
from trainer.storage.spool import SCHEMA, Spool
from trainer.storage.stored import JournalEntry, StoredMessage, decode_entry, encode_entry

RECORDS: tuple[Callable[[bytes], Any], ...] = (
    *(
        functools.partial(json_codec.decode, kind=kind)
        for kind in (Lease, TakenBatch, StepRecord, dict[str, Any])
    ),
    json_codec.decode_status,
    functools.partial(json_codec.decode_peer, b"x"),
)


def ledger_record(data: bytes, _: Path) -> None:
    """Every answer of a script is a value that can be written as JSON, or a ProtocolError."""
    for decode in RECORDS:
        try:
            found = decode(data)
        except ProtocolError:
            continue
        msgspec.json.encode(found)


def event_log(data: bytes, scratch: Path) -> None:
    """`tether verify` reports on any file; the archive finds its end, or a last line that is no event."""
    path = scratch / "audit.jsonl"
    path.write_bytes(data)
    result = verify(path)
    assert result.ok or result.violations
    msgspec.json.encode(result)
    try:
        assert isinstance(last_sequence(path), int)
    except TetherError:
        return
    assert path.read_bytes() in (data, data[: data.rfind(b"\n") + 1])


def step_log(data: bytes, scratch: Path) -> None:
    """The monitor shows the lines that are steps."""
    path = scratch / "metrics.jsonl"
    path.write_bytes(data)
    numbers = [line["step"] for line in read_steps(path)]
    assert numbers == sorted(set(numbers))


def checkpoint(data: bytes, scratch: Path) -> None:
    """A manifest is that of a complete checkpoint with files in its directory, or the checkpoint is torn."""
    directory = scratch / "step_00000003"
    directory.mkdir(exist_ok=True)
    (directory / "rank_00000.safetensors").write_bytes(b"weights")
    (directory / "manifest.json").write_bytes(data)
    try:
        found = Checkpoints(scratch, 1).latest()
    except SettingsError:
        return
    if found is not None:
        assert found.version == 3
        assert {part.name for part in found.manifest.files} <= {"rank_00000.safetensors", "manifest.json"}


def journal(data: bytes, _: Path) -> None:
    """An entry of the journal is one whatever it holds, or counts as damaged."""
    entry = decode_entry(3, data, xxhash.xxh3_64_digest(data))
    if entry is not None:
        assert entry.position == 3
        assert all(isinstance(group, int) for group in entry.groups)


def spool_file(data: bytes, scratch: Path) -> None:
    """A file that is no spool, or a damaged one, is a SpoolError."""
    path = scratch / "spool.sqlite"
    for old in scratch.glob("spool.sqlite*"):
        old.unlink()
    path.write_bytes(data)
    try:
        spool = Spool(path)
        try:
            assert spool.get_many([(7, "a")]) == [b"\x01"]
            spool.journal()
            list(spool.damaged())
        finally:
            spool.close()
    except (SpoolError, LookupError):
        pass


def endpoint(data: bytes, scratch: Path) -> None:
    """The note of an embedded server gives a URL, or is refused with a remedy."""
    (scratch / "endpoint.json").write_bytes(data)
    with contextlib.suppress(SettingsError):
        assert isinstance(read_endpoint(scratch), str)


def report(data: bytes, _: Path) -> None:
    """The sandbox's report, even if forged with the secret word, names only tests that exist."""
    found = parse_report(data, "nonce", 3)
    if found is not None:
        passed, isolation = found
        assert set(passed) <= {0, 1, 2}
        assert isolation <= KINDS


ENTRY = JournalEntry("commit", "e1", 0, (1, 2), 7)


def _spool_seed() -> bytes:
    """Return an empty spool, as small as SQLite makes one."""
    with sqlite3.connect(":memory:") as connection:
        connection.execute("PRAGMA page_size = 512")
        connection.execute(
            "CREATE TABLE records (grp INT, token TEXT, payload BLOB, sum BLOB, accepted_ms INT)"
        )
        connection.execute(
            "CREATE TABLE journal (seq INTEGER PRIMARY KEY, ledger_seq INT, payload BLOB, sum BLOB)"
        )
        connection.execute("CREATE TABLE meta (id TEXT)")
        connection.execute("INSERT INTO meta VALUES ('x')")
        record = StoredMessage.received(7, "a", b"\x01")
        row = (record.group, record.token, record.payload, record.checksum.to_bytes(8), 0)
        connection.execute("INSERT INTO records VALUES (?, ?, ?, ?, ?)", row)
        connection.execute("INSERT INTO journal VALUES (1, 3, ?, ?)", encode_entry(ENTRY))
        connection.execute(f"PRAGMA user_version = {SCHEMA}")
        return connection.serialize()


BOUND = {"max_staleness": 1, "groups_per_step": 2, "policy": "mask"}
TAKEN = {"group": 7, "token": "a", "deadline": 2, "max_staleness": 1, "version": 1, "counts": {"1": 20}}
RECORD_SEEDS: tuple[Any, ...] = (
    {"group": 7, "token": "a", "epoch": "e", "version": 1, "deadline": 2, "max_staleness": 1, "attempt": 1},
    {"step": 1, "groups": [TAKEN], "dropped": [4]},
    {"step": 1, "epoch": "e", "digest": "99", "groups": [TAKEN]},
    {"version": 1, "epoch": "e", "sequence": 9, "steps": 3, "issued": 4, "trained": 2,
     "dropped": 0, "wasted_tokens": 0, "halted": "", "draining": False, "bound": BOUND,
     "pending": BOUND, "states": {"waiting": 1}, "dropped_by_reason": {"stale": "1"},
     "engines": {"x": "e 1"}},
    {"role": "ingest", "info": {"pid": 1, "endpoints": {"scored": "tcp://127.0.0.1:1"}}},
)  # fmt: skip
_LEASE = {
    "group": 0,
    "token": "a",
    "epoch": "e",
    "engine": "x",
    "holder": "h",
    "version": 0,
    "deadline": 1,
    "bound": 1,
    "attempt": 1,
}
_EVENTS: tuple[dict[str, Any], ...] = (
    {"event": "create", "fingerprint": "f", "prompts": -1, "steps": 2, **BOUND, "groups_per_step": 1},
    {"event": "claim", "epoch": "e"},
    {"event": "resume", "epoch": "e", "version": 0, "digest": "1", "continued": True},
    {"event": "applied", "engine": "x", "epoch": "e", "version": 0},
    {"event": "lease", **_LEASE, "groups_per_step": 1, "policy": "mask"},
    {"event": "expire", "group": 0},
    {"event": "extend", "group": 0, "token": "a"},
    {"event": "accept", "group": 0, "token": "a", "counts": {"0": 5}},
    {"event": "take", "epoch": "e", "step": 0, "groups": [0]},
    {"event": "commit", "epoch": "e", "step": 0, "version": 1, "digest": "2", "groups": {"0": {"0": 5}},
     "issued": 1, "trained": 1, "dropped": 0, "active": 0},
    {"event": "checkpoint", "version": 1},
)  # fmt: skip
EVENT_LOG = b"".join(
    json.dumps({"seq": i, "time_ms": i, **event}).encode() + b"\n" for i, event in enumerate(_EVENTS, 1)
)
FILE = {"name": "rank_00000.safetensors", "nbytes": 7, "xxh3": "0" * 16}
CHECKPOINT = {
    "version": 3,
    "epoch": "e",
    "sequence": 9,
    "digest": 1,
    "spool_position": 2,
    "layout": {"tensor": 1},
}
CHECKPOINTS = [
    json.dumps({**CHECKPOINT, "files": [{**FILE, "name": name}]}).encode()
    for name in (FILE["name"], "../step_00000003/x", "a\0")
]
ENDPOINTS = [
    b'{"url": "redis://:x@127.0.0.1:1/0", "pid": 3}',
    b"",
    b"[]",
    b'{"url": "redis://[x:y/"}',
    b"[" * 5000,
]

TARGETS = {
    "ledger_record": Target(ledger_record, [json.dumps(seed).encode() for seed in RECORD_SEEDS], Form.JSON),
    "event_log": Target(
        event_log, [EVENT_LOG, EVENT_LOG.replace(b"1", b"-1"), b"[" * 5000 + b"\n"], Form.LINES
    ),
    "step_log": Target(
        step_log,
        [b'{"step": 1, "epoch": "e"}\n{"step": 0}\n', b'[]\n{"step": "1"}\n\xff\n' + b"[" * 5000],
        Form.LINES,
    ),
    "checkpoint": Target(
        checkpoint,
        CHECKPOINTS,
        Form.JSON,
    ),
    "journal": Target(journal, [encode_entry(ENTRY)[0], b"", b'{"1": 2}', b"[null]"], Form.JSON),
    "spool_file": Target(
        spool_file, [_spool_seed(), _spool_seed().replace(b"journal", b"journ\xa0l"), b"junk"], Form.BYTES
    ),
    "endpoint": Target(endpoint, ENDPOINTS, Form.JSON),
    "report": Target(report, [b"nonce isolation net pid\nnonce 0\nnonce 2\nnonce done\n"], Form.BYTES),
}
