"""What a rollout worker counts and logs of its episodes."""

import logging
from pathlib import Path

import pytest

from protocol.errors import Reason
from rollout.episodes import EpisodeReport
from rollout.sample import PromptTokens
from services.observability.metrics import Metrics
from services.rollout.group_runner import PrefixUse, observe_episode
from tests.contracts.ledger_rig import MemoryRig
from tests.services.bus.harness import eventually
from tests.services.rollout.sessions import SAMPLES, SessionWorld


def test_episodes_are_counted_and_failures_logged_with_their_reason(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics("rollout")
    with caplog.at_level(logging.INFO, "tether.leasing"):
        observe_episode(metrics, 7, EpisodeReport(2, 0, 3, 40, 1.5, "call_s", "request 7/2: no answer"))
        assert caplog.messages == [
            "episode.failed group=7 sample=2 attempt=0 turns=3 reason=call_s error=request 7/2: no answer"
        ]
        observe_episode(metrics, 7, EpisodeReport(2, 1, 4, 50, 0.5))
        assert len(caplog.messages) == 1

    def counted(event: str) -> float | None:
        return metrics.registry.get_sample_value("tether_events_total", {"event": event})

    assert [counted(event) for event in ("episode.done", "episode.turns", "episode.failed.call_s")] == [
        1,
        7,
        1,
    ]
    assert counted("tokens.failed") == 40
    seconds = metrics.registry.get_sample_value("tether_work_seconds_sum", {"kind": "episode"})
    assert seconds == 2.0


def test_hit_rate_is_of_first_and_later_calls_together() -> None:
    use = PrefixUse()
    assert use.hit_rate is None
    first, later = PromptTokens(10, 4), PromptTokens(90, 71)
    use.add(EpisodeReport(0, 0, 3, 12, 0.5, first_prompt=first, later_prompts=later))
    use.add(EpisodeReport(1, 0, 0, 0, 0.5, failure="call_s"))
    assert use.tokens() == {
        ("first", "cache"): 4,
        ("first", "computed"): 6,
        ("later", "cache"): 71,
        ("later", "computed"): 19,
    }
    assert use.hit_rate == 0.75


async def test_a_group_too_large_to_send_is_handed_back_and_the_worker_goes_on(tmp_path: Path) -> None:
    world = SessionWorld(MemoryRig(), tmp_path, 2, ("bus.max_frame_bytes=1000",))
    async with world.running(E=1, B=1):
        await world.environment.next_calls()
        await eventually(lambda: world.environment.in_tool == SAMPLES)  # under the next lease


async def test_a_group_that_the_engine_fails_is_leased_again_and_never_dropped_for_its_prompt(
    tmp_path: Path,
) -> None:
    world = SessionWorld(MemoryRig(), tmp_path, 2, ())
    async with world.running(E=1, B=1):
        await world.engine.pause()
        for _ in range(SAMPLES):
            world.environment.may_call.release()
        await eventually(lambda: world.engine.running == SAMPLES)
        await world.engine.abort_all()
        await world.engine.resume()
        await eventually(lambda: world.environment.in_tool == SAMPLES)  # under the next lease
        assert [held.lease.attempt for held in world.runner._held.values()] == [2]
        assert (await world.ledger.status()).dropped_by_reason == {}


async def test_a_worker_with_groups_leaves_room_to_one_that_waits_without(tmp_path: Path) -> None:
    world = SessionWorld(MemoryRig(), tmp_path, 2, ("rollout.groups_in_flight=2",))
    async with world.running(E=0, B=1):
        await world.driver.refused(Reason.BOUND, world.driver.lease())
        await world.ledger.set_bound(groups_per_step=2)
        world.runner.nudge()
        metrics, event = world.process.metrics.registry, {"event": "lease.refused.busier"}
        await eventually(lambda: bool(metrics.get_sample_value("tether_events_total", event)))
        assert (await world.driver.lease()).group == 1
