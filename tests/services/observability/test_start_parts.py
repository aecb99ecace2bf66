"""Tests the line that says what a start took."""

from services.ledger.interface import Peer
from services.observability.start_parts import READY, describe_start


def test_start_is_told_in_parts() -> None:
    peers = [
        Peer("rollout", "rollout.0.1", {"name": "rollout.0", READY: {"engine": 15.04}}),
        Peer("trainer", "trainer.1", {"name": "trainer", READY: {"model": 8.0}}),
        Peer("ingest", "ingest.1", {"name": "ingest"}),
    ]
    assert describe_start(peers, 4.0, 22.0) == (
        "started in 22.0 s: preparation 4.0 s, trainer (model) 8.0 s, rollout.0 (engine) 15.0 s, "
        "then the first step 3.0 s"
    )


def test_start_without_parts_is_told_as_a_whole() -> None:
    peers = [Peer("trainer", "trainer.1", {READY: "soon"})]
    assert describe_start(peers, 1.0, 2.5) == "started in 2.5 s: preparation 1.0 s, then the first step 1.5 s"
