"""Tests how the terminal tells what a process does, and who waits for whom."""

from typing import Any

import pytest

from services.ledger.interface import Peer
from services.observability.service_rows import ServiceRow, describe_process, service_rows, wait_text


def peer(role: str, name: str = "x", **info: Any) -> Peer:
    return Peer(role, f"{name}.1", {"name": name, **info})


@pytest.mark.parametrize(
    ("process", "state", "sentence"),
    [
        (peer("trainer", work={"step 3": (1, 120.4)}), "works", "x: step 3, 120 s so far"),
        (
            peer("trainer", waits={"groups: not_enough: 3 of 8 groups are scored": 4.0}),
            "waits",
            "x: waits for rollouts and rewards: 3 of 8 groups are scored, 4 s so far",
        ),
        (
            peer("trainer", waits={"groups: straggler: 7": 4.0}),
            "waits",
            "x: waits for rollouts and rewards: group 7 is late, 4 s so far",
        ),
        (
            peer("trainer", work={"step 3": (1, 120.4)}, waits={"room: the disk of d is full": 4.0}),
            "waits",
            "x: waits for room: the disk of d is full, 4 s so far",
        ),
        (peer("trainer", waits={"model load": 9.0}), "starts", "x: loads the model, 9 s so far"),
        (peer("rollout", groups=12, waits={"a lease: bound": 8.0}), "works", "x: generates 12 groups"),
        (
            peer("rollout", groups=1, waits={"acknowledgement of group 9": 2.0, "a lease: bound": 1.0}),
            "waits",
            "x: waits for rewards (2 groups), 2 s so far",
        ),
        (
            peer("rollout", groups=0, waits={"a lease: bound": 8.0}),
            "waits",
            "x: waits for the trainer's next step (staleness bound), 8 s so far",
        ),
        (
            peer("rollout", waits={"a lease: the engine serves no version": 8.0}),
            "waits",
            "x: waits for the trainer's weights, 8 s so far",
        ),
        (peer("rollout", waits={"something new": 2.0}), "waits", "x: waits for something new, 2 s so far"),
        (peer("reward"), "waits", "x: waits for rollouts"),
        (
            peer("reward", work={"scores groups": (3, 2.0)}),
            "works",
            "x: scores groups (3 at a time), 2 s so far",
        ),
        (peer("monitor"), "works", "x: serves the page"),
        (peer("of another release"), "works", "x: is ready"),
    ],
)
def test_process_is_told_in_a_sentence(process: Peer, state: str, sentence: str) -> None:
    row = describe_process("x", process)
    assert (row.state, row.sentence()) == (state, sentence)


def test_a_wait_is_told_without_what_changes_in_it() -> None:
    assert wait_text("rollout", "acknowledgement of group 9") == "waits for rewards"
    assert wait_text("trainer", "groups: not_enough: 3 of 8") == "waits for rollouts and rewards"
    assert wait_text("rollout", "something new") == "waits for something new"


def test_rows_have_the_order_of_what_is_expected_and_name_what_is_missing() -> None:
    peers = [peer("reward", "reward.0"), peer("of a user", "other"), peer("trainer", "trainer")]
    rows = service_rows(peers, {"trainer": 0, "rollout.0": 0, "reward.0": 1, "rollout.1": 2}, 5.0)
    assert [row.name for row in rows] == ["trainer", "rollout.0", "reward.0", "rollout.1", "other"]
    assert rows[1] == ServiceRow("rollout.0", "starts", "starts", 5.0)
    assert rows[2].restarts == 1
    assert (rows[3].state, rows[3].text) == ("missing", "starts again")
    assert [row.name for row in service_rows(peers)] == ["other", "reward.0", "trainer"]
