"""A second decoder counts the tokens of stored records, and the accepts of the log have the same counts."""

import json
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import msgpack
import msgspec
import pytest

from protocol.codec import encode_payload
from protocol.messages import ScoredRollout
from protocol.rollout_view import decode_rollout
from protocol.tensors import Array
from services.ledger.event_log.archiver import FILE
from services.tools.verification import verify_run
from tests.protocol.samples import BRANCHED, ROLLOUT
from tests.services.monitor.runs import recorded_run
from trainer.storage.spool import Spool
from trainer.storage.stored_tokens import STEPS, StoredTokens, count_stored_tokens, tokens_by_version


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return recorded_run(tmp_path)


def counted(run_dir: Path) -> StoredTokens:
    return count_stored_tokens(run_dir, run_dir / FILE)


@pytest.mark.parametrize("rollout", [ROLLOUT, BRANCHED], ids=["samples", "branches"])
def test_both_decoders_count_the_same(rollout) -> None:  # type: ignore[no-untyped-def]
    payload = encode_payload(ScoredRollout(rollout=rollout, rewards=Array.of([0.0], "float32")))
    counts = tokens_by_version(payload, rollout.group, rollout.token)
    assert counts == decode_rollout(rollout).token_counts()
    assert counts.total() > 0


def test_recorded_run_is_compared_with_its_log(run_dir: Path) -> None:
    found = counted(run_dir)
    assert found.violations == ()
    assert found.tokens > found.records > 0
    facts = verify_run(run_dir)
    assert (facts["violations"], facts["records"], facts["record_tokens"]) == (
        [],
        found.records,
        found.tokens,
    )


def test_count_that_the_record_does_not_have_is_a_violation(run_dir: Path) -> None:
    with closing(sqlite3.connect(run_dir / "spool.sqlite")) as connection:
        group, token = connection.execute("SELECT grp, token FROM records").fetchone()
    lines = [json.loads(line) for line in (run_dir / FILE).read_text().splitlines()]
    accept = next(e for e in lines if e["event"] == "accept" and (e["group"], e["token"]) == (group, token))
    before = {int(version): n for version, n in accept["counts"].items()}
    accept["counts"] = {"0": 1}
    (run_dir / FILE).write_text("".join(json.dumps(event) + "\n" for event in lines))
    assert counted(run_dir).violations == (
        f"spool: group {group}: its record has {before} sampled tokens by version, "
        "and its accept has {0: 1}",
    )


def test_cancelled_samples_are_those_of_the_line_of_their_step(tmp_path: Path) -> None:
    payload = encode_payload(ScoredRollout(rollout=ROLLOUT, rewards=Array.of([0.0], "float32")))
    with closing(Spool(tmp_path / "spool.sqlite")) as spool:
        spool.put_many([(ROLLOUT.group, ROLLOUT.token, payload)])
    counts = {str(v): n for v, n in decode_rollout(ROLLOUT).token_counts().items()}
    events = [
        {"event": "accept", "group": ROLLOUT.group, "token": ROLLOUT.token, "counts": counts},
        {"event": "take", "step": 4, "epoch": "e1", "groups": [ROLLOUT.group]},
    ]
    (tmp_path / FILE).write_text("".join(json.dumps(event) + "\n" for event in events))
    lines = (("e1", 2, 3, 0), ("e1", 1, 3, 1), ("e1", None, None, 1), ("e0", 1, 1, 0))
    for epoch, samples, tokens, wrong in lines:
        line = {"step": 4, "epoch": epoch, "cancelled_samples": samples, "cancelled_tokens": tokens}
        (tmp_path / STEPS).write_text(json.dumps(line) + "\n")
        found = counted(tmp_path)
        assert (found.records, found.cancelled_samples, found.cancelled_tokens) == (1, 2, 3)
        assert len(found.violations) == wrong
    (tmp_path / STEPS).write_text(json.dumps({"step": 4, "epoch": "e1", "cancelled_samples": 1}) + "\n")
    assert counted(tmp_path).violations == (
        "step 4: its line has 1 cancelled samples of 0 tokens, and its records have 2 of 3",
    )


def test_accepts_of_a_rebuild_are_compared(tmp_path: Path) -> None:
    payload = encode_payload(ScoredRollout(rollout=ROLLOUT, rewards=Array.of([0.0], "float32")))
    with closing(Spool(tmp_path / "spool.sqlite")) as spool:
        spool.put_many([(ROLLOUT.group, ROLLOUT.token, payload)])
    accept = {"event": "accept", "group": ROLLOUT.group, "token": ROLLOUT.token, "counts": {"99": 1}}
    for told in ([accept], [{"event": "commit", "accepted": [accept]}]):
        (tmp_path / FILE).write_text(json.dumps({"event": "rebuild", "told": told}) + "\n")
        assert "and its accept has {99: 1}" in counted(tmp_path).violations[0]


def scored(rollout: object) -> bytes:
    return encode_payload(ScoredRollout(rollout=rollout, rewards=Array.of([0.0], "float32")))  # type: ignore[arg-type]


UNREADABLE = {
    "cut": (scored(ROLLOUT)[:-1], "msgpack cannot read its record under lease t: "),
    "other message": (msgpack.packb({"kind": "hello"}), "'rollout'"),
    "other group": (
        scored(msgspec.structs.replace(ROLLOUT, group=8, token="t")),
        "it is of group 8 and lease t",
    ),
    "spans": (
        scored(msgspec.structs.replace(ROLLOUT, group=7, token="t", spans=Array.of([[0, 1, 3]], "int32"))),
        "its spans cover 1 of ",
    ),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_record_that_msgpack_cannot_read_is_a_violation(tmp_path: Path, kind: str) -> None:
    payload, problem = UNREADABLE[kind]
    with closing(Spool(tmp_path / "spool.sqlite")) as spool:
        spool.put_many([(7, "t", payload)])
    (tmp_path / FILE).write_text("")
    found = counted(tmp_path)
    assert (found.records, found.tokens, len(found.violations)) == (0, 0, 1)
    assert found.violations[0].startswith("spool: group 7: ")
    assert problem in found.violations[0]


def test_damaged_files_are_left_to_the_check_of_files(run_dir: Path) -> None:
    for path in (run_dir / "archive").iterdir():
        path.write_bytes(b"\x93garbage")
    (run_dir / "spool.sqlite").write_bytes(b"no database" * 1000)
    (run_dir / FILE).write_text('{"event": "accept"\n')
    assert counted(run_dir) == StoredTokens(0, 0, 0, 0, ())


def test_empty_counts_of_a_version_are_not_compared() -> None:
    mask = Array.of([0] * len(ROLLOUT.loss_mask.data), "uint8")
    payload = scored(msgspec.structs.replace(ROLLOUT, loss_mask=mask))
    assert tokens_by_version(payload, ROLLOUT.group, ROLLOUT.token) == Counter()
