"""Tests the report of a step: its counts, nulls and warnings; and when skipped steps halt."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from protocol.messages import WeightApplied, WeightFailed
from protocol.staleness import Bound, Policy
from protocol.topics import Role
from services.ledger.interface import LedgerStatus, Peer, TakenBatch
from services.runtime.process import Process
from services.settings.sections import Settings
from services.trainer.step_report import (
    SkipLimit,
    StepReporter,
    TrainedStep,
    excess_mismatch,
    halt_cause,
)
from tests.contracts.memory_ledger.ledger import MemoryLedger
from tests.trainer.groups import GroupSpec, scored
from trainer.algorithms import AlgorithmConfig, make_algorithm
from trainer.backends.base import StepStats
from trainer.config import TrainerConfig
from trainer.step.plan import plan_step

NAN = "the gradient's norm is nan"
PLAN = plan_step(
    [(scored(GroupSpec(generate_s=2.0)), 1)],
    step=0, algorithm=make_algorithm(AlgorithmConfig()),
)  # fmt: skip
STATUS = LedgerStatus(
    version=0, epoch="e1", sequence=1, bound=Bound(1, 1, Policy.MASK), pending=None, steps=9, issued=1,
    trained=0, dropped=2, states={}, dropped_by_reason={"stale": 2}, wasted_tokens=10,
)  # fmt: skip
TIMES = {
    "step_s": 6.0, "wait_s": 1.0, "train_s": 2.0, "publish_s": 0.5, "checkpoint_s": 0.25, "other_s": 2.25,
}  # fmt: skip


def reporter(device: str = "") -> StepReporter:
    process = Process(Role.TRAINER, Settings(), MemoryLedger(), "trainer")  # type: ignore[arg-type]
    made = StepReporter(process, device)
    made.start(STATUS)
    return made


def report(
    made: StepReporter,
    *,
    status: LedgerStatus = STATUS,
    lengths: tuple[tuple[int, ...], ...] = (),
    engine: Mapping[str, Any] | None = None,
    reward: Mapping[str, Any] | None = None,
    **stats: float,
) -> Any:
    step = TrainedStep(TakenBatch(0, ()), PLAN, StepStats(trained_tokens=2, **stats), 989e12, lengths)  # type: ignore[arg-type]
    infos = (("rollout", engine), ("reward", reward))
    peers = [Peer(role, f"{role}.0.a", info) for role, info in infos if info is not None]
    return made.report(step, epoch="e1", times=TIMES, status=status, peers=peers)


def test_report_has_nulls_where_nobody_measured() -> None:
    found = report(reporter())
    nulls = ("entropy", "pause_ms", "engine_busy", "dropped_length_mean", "behaviour_kl_k3")
    assert [getattr(found, name) for name in nulls] == [None] * len(nulls)
    assert (found.generate_s, found.lag_mean, found.dropped_groups) == (2.0, 0.0, 0)
    assert (found.batch_digest, found.step_tokens) == (PLAN.digest, 4)


def test_report_has_speed_of_the_batch_and_use_of_a_known_gpu() -> None:
    found = report(reporter())
    assert (found.tokens_per_s, found.train_tokens_per_s) == (4 / 6.0, 4 / 2.0)
    assert (found.step_s, found.other_s, found.mfu) == (6.0, 2.25, None)
    assert report(reporter("NVIDIA H100 80GB HBM3")).mfu == 0.5


def applied(pause_ms: float) -> WeightApplied:
    return WeightApplied(engine="rollout.0.a", epoch="e1", version=1, pause_ms=pause_ms)


def test_an_answer_for_an_engine_that_is_not_registered_is_counted_only() -> None:
    made = reporter()
    for message in (applied(7.0), WeightFailed(engine="rollout.0.a", epoch="e1", version=1, error="bad")):
        made.note_answer(message, {"rollout.1.b"})
    assert report(made).pause_ms is None
    counts = made._process.metrics.registry
    assert counts.get_sample_value("tether_events_total", {"event": "weights.unknown_engine"}) == 2
    assert counts.get_sample_value("tether_events_total", {"event": "weights.failed"}) is None


def test_pause_is_the_longest_since_the_last_report() -> None:
    made = reporter()
    for pause_ms in (3.0, 5.0, 4.0):
        made.note_answer(applied(pause_ms), {"rollout.0.a"})
    assert report(made).pause_ms == 5.0
    assert report(made).pause_ms is None


def test_drops_are_counted_by_reason_and_length() -> None:
    made = reporter()
    now = replace(STATUS, dropped=5, wasted_tokens=30, dropped_by_reason={"stale": 3, "attempts": 2})
    found = report(made, status=now, lengths=((4, 8), (9, 9, 10)))
    assert (found.dropped_groups, found.wasted_tokens) == (3, 20)
    assert found.dropped_by_reason == {"stale": 1, "attempts": 2}
    assert (found.dropped_length_mean, found.dropped_length_groups) == (8.0, 2)
    assert report(made, status=now).dropped_by_reason == {"stale": 0, "attempts": 0}


def test_engines_and_rewards_are_busy_between_their_own_heartbeats() -> None:
    made = reporter()
    beats = [{"busy_at_s": t, "busy_s": b} for t, b in ((0, 0), (0, 0), (5, 5), (5, 5), (10, 7.5))]
    assert [report(made, engine=beat).engine_busy for beat in beats] == [None, None, 1.0, None, 0.5]
    assert [report(made, reward=beat).reward_busy for beat in beats] == [None, None, 1.0, None, 0.5]


@pytest.mark.parametrize(
    ("error", "limit", "warns"),
    [
        (1.06, 1.05, True),
        (1.05, 1.05, False),
        (None, 1.05, False),
        (9.0, 0.0, False),
        (float("nan"), 1.05, True),
    ],
)
def test_mismatch_over_the_limit_is_a_warning(error: float | None, limit: float, warns: bool) -> None:
    stats = StepStats(trained_tokens=1, token_mult_prob_error=error)
    text = excess_mismatch(7, stats, TrainerConfig(mismatch_limit=limit))
    assert bool(text) is warns
    assert not warns or "step 7: engine and trainer disagree" in text


def test_report_carries_its_warning() -> None:
    assert report(reporter(), token_mult_prob_error=1.3).warnings[0].startswith("step 0: engine and trainer")
    assert report(reporter(), token_mult_prob_error=1.001).warnings == ()
    both = report(reporter(), token_mult_prob_error=1.3, warnings=("out of memory",)).warnings
    assert (both[0], len(both)) == ("out of memory", 2)


def test_report_counts_groups_without_signal_where_they_are_filtered() -> None:
    now = replace(
        STATUS,
        dropped_by_reason={"stale": 2, "no_signal": 3},
        wasted_by_reason={"stale": 10, "no_signal": 70},
    )
    found = report(reporter(), status=now)
    assert (found.filtered_groups, found.filtered_tokens, found.filtered_share) == (None, None, None)
    settings = replace(Settings(), algorithm=AlgorithmConfig(filter_groups=True))
    process = Process(Role.TRAINER, settings, MemoryLedger(), "trainer")  # type: ignore[arg-type]
    filtering = StepReporter(process)
    filtering.start(STATUS)
    found = report(filtering, status=now)
    assert (found.filtered_groups, found.filtered_tokens, found.filtered_share) == (3, 70, 1.0)
    found = report(filtering, status=now)
    assert (found.filtered_groups, found.filtered_tokens, found.filtered_share) == (0, 0, 0.0)


def test_halt_cause_names_cause_and_likely_settings() -> None:
    text = halt_cause(3, NAN)
    assert text.startswith("3 steps in a row were skipped")
    assert NAN in text
    assert "trainer.max_skipped_steps" in text
    assert "algorithm.advantage_eps" in text
    assert "bound.max_staleness" in halt_cause(1, "no token of the batch is within the bound")


def test_skip_limit_is_reached_by_skipped_steps_in_a_row() -> None:
    limit = SkipLimit(2)
    causes = [limit.cause_after(skipped) for skipped in (NAN, "", NAN, NAN)]
    assert causes[:3] == ["", "", ""]
    assert causes[3] == halt_cause(2, NAN)
    assert limit.cause_after(NAN) == ""  # counted anew after the halt
    assert limit.cause_after(NAN) != ""


def test_skip_limit_of_one_allows_no_skipped_step() -> None:
    limit = SkipLimit(1)
    assert limit.cause_after("") == ""
    assert limit.cause_after(NAN) != ""
