"""What is said of a kill: how far the version had come, and how long recovery took."""

from typing import Any

import pytest

from tests.trials.chaos.gpu_kills.layouts import Moment, Part, Target
from tests.trials.chaos.gpu_kills.moments import (
    NOT_IN_FLIGHT,
    Announced,
    Kill,
    Recovery,
    Staged,
    fate,
    recovery,
    state_at,
    torn,
    transfers_ms,
)

TRAINER, ENGINE = Target(Part.TRAINER, 1), Target(Part.CORE)
DRAFT = Announced(1000, Moment.DRAFT, "e1", 5)


def event(kind: str, time_ms: int, **more: Any) -> dict[str, Any]:
    return {"event": kind, "time_ms": time_ms, "epoch": "e1", "version": 5, "digest": "7"} | more


BEFORE = [
    event("claim", 10),
    event("applied", 20, engine="first", version=4),
    event("commit", 900, version=4),
]
STAGED = [Staged(1060, "first", "e1", 5, 7)]
MADE = [*BEFORE, event("commit", 1050), event("applied", 1070, engine="first")]


@pytest.mark.parametrize(
    ("at_ms", "state"),
    [
        (1010, "being sent, not committed"),
        (1055, "committed, being received"),
        (1065, "staged, not served yet"),
        (1080, NOT_IN_FLIGHT),
    ],
)
def test_state_is_how_far_the_version_had_come(at_ms: float, state: str) -> None:
    assert state_at(Kill(ENGINE, at_ms, DRAFT), MADE, STAGED) == state


def test_recovery_from_a_trainers_death_counts_what_its_successor_does_alone() -> None:
    kill = Kill(TRAINER, 1010, DRAFT)
    late = [*MADE, event("claim", 3000, epoch="e2")]
    assert recovery(kill, late) == Recovery(None, None, None, 0)
    rewind = event("resume", 3500, epoch="e2", version=3, continued=False)
    again = [
        *late, rewind, event("applied", 4010, epoch="e2", engine="first", version=3),
        event("commit", 5010, epoch="e2", version=4), event("commit", 6010, epoch="e2"),
    ]  # fmt: skip
    assert recovery(kill, again) == Recovery(served_s=3.0, step_s=4.0, working_s=4.0, rewound=1)
    assert fate(kill, again) == "committed by the next trainer, served by the same engine"


def test_recovery_from_an_engines_death_waits_for_another_engine() -> None:
    kill = Kill(ENGINE, 1010, DRAFT)
    without = [*BEFORE, event("commit", 1050), event("commit", 1510, version=6)]
    assert recovery(kill, without) == Recovery(None, 0.04, None, 0)
    served = [*without, event("applied", 3010, engine="second", version=6)]
    assert recovery(kill, served) == Recovery(2.0, 0.04, None, 0)
    working = [*served, event("commit", 3510, version=7)]
    assert recovery(kill, working) == Recovery(2.0, 0.04, 2.5, 0)
    assert fate(kill, working) == "committed, served as 6 by the next engine"


def test_a_version_that_nobody_committed_is_named() -> None:
    assert fate(Kill(TRAINER, 1010, DRAFT), BEFORE) == "never committed"


def test_transfer_ends_with_the_commit_after_a_draft_and_with_the_copy_after_a_manifest() -> None:
    announced = [DRAFT, Announced(1052, Moment.MANIFEST, "e1", 5), Announced(2000, Moment.DRAFT, "e1", 6)]
    assert transfers_ms(Moment.DRAFT, announced, STAGED, MADE) == [50]
    assert transfers_ms(Moment.MANIFEST, announced, STAGED, MADE) == [8]


def test_a_copy_with_another_digest_is_noticed() -> None:
    assert torn(STAGED, MADE) == []
    assert torn([Staged(1060, "first", "e1", 5, 8)], MADE) == [
        "first staged version 5 with digest 8, committed was 7"
    ]
