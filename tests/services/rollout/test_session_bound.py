"""Sessions that live over several versions, under each policy, on the ledger in memory and on a server."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocol.errors import BoundViolation, Refused
from protocol.messages import ScoredRollout
from protocol.staleness import Policy
from services.rollout.group_runner import DROPPED, STOPPING
from tests.contracts.ledger_rig import MemoryRig, RedisRig, Rig
from tests.services.bus.harness import eventually
from tests.services.ledger.conftest import valkey_url as valkey_url
from tests.services.rollout.sessions import SAMPLES, SessionWorld, Versioned
from tests.trainer.groups import by_sample, whole
from trainer.algorithms import AlgorithmConfig, make_algorithm
from trainer.step.plan import StepPlan, plan_step

Make = Callable[..., SessionWorld]


@pytest.fixture(params=["memory", "valkey"])
def url(request: pytest.FixtureRequest) -> str | None:
    """Where the ledger lies; None for the one in memory."""
    return None if request.param == "memory" else str(request.getfixturevalue("valkey_url"))


@pytest.fixture
async def rig(url: str | None) -> AsyncIterator[Rig]:
    made: Rig = MemoryRig() if url is None else await RedisRig.start(url)
    yield made
    await made.close()


@pytest.fixture
def make(rig: Rig, tmp_path: Path) -> Make:
    return lambda calls, *overrides: SessionWorld(rig, tmp_path, calls, overrides)


def plan(scored: ScoredRollout, *, step: int, bound: int, mask_late: bool) -> StepPlan:
    algorithm = make_algorithm(AlgorithmConfig())
    return plan_step([(scored, bound)], step=step, algorithm=algorithm, mask_late=mask_late)


def sampled_under(engine: Versioned, wanted: range, lengths: list[int]) -> list[list[bool]]:
    """Return for each sample which tokens were sampled under one of the wanted versions, as the engine saw
    it."""
    found = [np.zeros(length, dtype=bool) for length in lengths]
    for request, completion, version in engine.calls:
        row = found[int(request.id.split("/")[1].split(".")[0])]
        first = len(request.prompt)
        row[first : first + len(completion.tokens)] |= version in wanted
    return [row.tolist() for row in found]


async def test_under_mask_a_token_of_a_session_counts_by_its_own_version(make: Make) -> None:
    async with make(4).running(E=1, B=1, policy=Policy.MASK) as world:
        for _ in range(3):
            await world.step()
            await world.environment.next_calls()
        scored = await world.scored(version=3)
        taken = await world.ledger.take("e1")
        assert [group.group for group in taken.groups] == [0]
        assert set(taken.groups[0].counts) == {0, 1, 2, 3}
        planned = plan(scored, step=3, bound=1, mask_late=True)
        batch = whole(planned)
        lengths = planned.lengths.tolist()
        assert by_sample(batch, batch.loss_mask) == sampled_under(world.engine, range(2, 4), lengths)
        assert by_sample(batch, batch.sampled_mask) == sampled_under(world.engine, range(4), lengths)
        masked = sum(len(completion.tokens) for _, completion, version in world.engine.calls if version < 2)
        assert planned.stats.masked_tokens == masked
        assert planned.stats.masked_share == pytest.approx(masked / int(batch.sampled_mask.sum()))
        with pytest.raises(Refused, match=r"^bound: group 0"):
            await world.driver.commit(taken)  # every token that was sampled
        await world.driver.commit(taken, counts=planned.trained_counts)


async def test_under_wait_the_step_waits_for_a_session(make: Make) -> None:
    async with make(2).running(E=1, B=1, policy=Policy.WAIT) as world:
        await world.step()
        await world.other_group()
        with pytest.raises(Refused, match=r"straggler: 0$"):
            await world.ledger.take("e1")
        await world.environment.next_calls()
        scored = await world.scored(version=1)
        taken = await world.ledger.take("e1")
        assert [group.group for group in taken.groups] == [0]
        planned = plan(scored, step=1, bound=1, mask_late=False)
        assert planned.stats.masked_tokens == 0
        assert set(planned.trained_counts[0]) == {0, 1}
        await world.driver.commit(taken, counts=planned.trained_counts)
        with pytest.raises(BoundViolation):
            plan(scored, step=2, bound=1, mask_late=False)


async def test_under_wait_the_step_waits_no_longer_than_an_episode_may_take(make: Make) -> None:
    made = make(2, "environment.episode_s=2", "environment.attempts=1")
    async with made.running(E=1, B=1, policy=Policy.WAIT) as world:
        await world.step()
        other = await world.other_group()
        await world.engine.pause()
        for _ in range(SAMPLES):
            world.environment.may_call.release()  # for calls whose answers do not come
        await eventually(lambda: len(world.environment.refused) == SAMPLES)
        assert {status for status, _ in world.environment.refused} == {410}
        assert all("environment.episode_s 2 s" in text for _, text in world.environment.refused)
        await eventually(lambda: 0 not in world.runner._held)
        assert (await world.ledger.status()).dropped_by_reason == {"episode": 1}
        assert [group.group for group in (await world.ledger.take("e1")).groups] == [other.group]


@pytest.mark.parametrize("told_by", ["message", "lease"])
async def test_under_drop_a_session_ends_with_its_group(make: Make, told_by: str) -> None:
    made = make(3, "rollout.lease_s=0.5" if told_by == "lease" else "rollout.lease_s=3000")
    async with made.running(E=1, B=1, policy=Policy.DROP) as world:
        await world.step()
        other = await world.other_group()
        await _one_generates(world)
        taken = await world.ledger.take("e1")
        assert ([group.group for group in taken.groups], taken.dropped) == ([other.group], (0,))
        if told_by == "message":
            world.runner.abort(taken.dropped)
        await _both_refused(world, DROPPED if told_by == "message" else "group 0 is dropped")
        await _place_is_free(world)


async def test_a_session_ends_with_the_lease_of_its_group(make: Make, rig: Rig) -> None:
    async with make(3, "rollout.lease_s=0.5").running(E=2, B=1, policy=Policy.MASK) as world:
        await _one_generates(world)
        rig.expire(0)
        taken_over = await world.driver.lease()
        assert taken_over.group == 0
        await _both_refused(world, "the lease of its group is lost")
        await _place_is_free(world)
        await world.ledger.extend(0, taken_over.token, 60_000)


@pytest.mark.parametrize("why", ["bound: group 0 had expired", "the record is full"])
async def test_a_group_whose_calls_are_refused_is_dropped_unless_its_lease_is_lost(
    make: Make, why: str
) -> None:
    made = make(2, "environment.attempts=1", "rollout.lease_s=3000")
    made.refusal, lost = why, why.startswith("bound")
    async with made.running(E=2, B=1, policy=Policy.MASK) as world:
        for _ in range(SAMPLES):
            world.environment.may_call.release()
        await eventually(lambda: len(world.environment.refused) == SAMPLES)
        assert all(why in text for _, text in world.environment.refused)
        await eventually(lambda: world.environment.in_tool == SAMPLES)  # in the next group, or in it again
        assert list(world.runner._held) == [0 if lost else 1]
        assert (await world.ledger.status()).dropped_by_reason == ({} if lost else {"episode": 1})


async def test_a_session_ends_with_its_worker(make: Make) -> None:
    async with make(3).running(E=1, B=1, policy=Policy.MASK) as world:
        await _one_generates(world)
        world.process.stop.set()
        await _both_refused(world, STOPPING)
        await eventually(lambda: not world.runner._held)
    status = await world.ledger.status()
    assert (status.states["waiting"], status.dropped) == (1, 0)


async def _one_generates(world: SessionWorld) -> None:
    """Have one session wait for an answer that does not come, the other for its tool."""
    await world.engine.pause()
    world.environment.may_call.release()
    await eventually(lambda: world.engine.running == 1)


async def _both_refused(world: SessionWorld, why: str) -> None:
    """Check that the running call and the next one of the other session are answered 410, and why."""
    refused: list[Any] = world.environment.refused
    await eventually(lambda: len(refused) == 1)
    world.environment.may_call.release()
    await eventually(lambda: len(refused) == 2)
    assert [status for status, _ in refused] == [410, 410]
    assert all(why in text for _, text in refused), refused
    assert not world.engine.running


async def _place_is_free(world: SessionWorld) -> None:
    """Check that the worker begins another group once there is room under the bound."""
    await world.engine.resume()
    await eventually(lambda: 0 not in world.runner._held)
    status = await world.ledger.status()
    if status.states["taken"]:
        taken = await world.ledger.take("e1")
        await world.serve(await world.driver.commit(taken))
    world.runner.nudge()
    await eventually(lambda: world.environment.in_tool == SAMPLES)
    assert list(world.runner._held) not in ([], [0])
