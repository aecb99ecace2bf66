"""Tests that every engine must pass about sleep, whether it supports it or not.

The suite is `rollout/engines/contract/suite.py`.
"""

import asyncio

import pytest

from protocol.errors import EngineError, Unsupported, WeightError
from rollout.engines.base import Completion, Served
from rollout.engines.contract.bench import LONG, PROMPTS, Bench, ask
from rollout.engines.contract.suite import assert_switched

TURNS = 50
"""Enough turns to end a short request if the engine were running."""


@pytest.fixture
def sleeper(bench: Bench) -> Bench:
    if not bench.engine.capabilities.sleep:
        pytest.skip("this engine cannot sleep: another test sees it refuse")
    return bench


class SleepContract:
    async def test_unsupported_sleep_is_refused(self, bench: Bench) -> None:
        if bench.engine.capabilities.sleep:
            pytest.skip("this engine can")
        for method in (bench.engine.sleep, bench.engine.wake):
            with pytest.raises(Unsupported):
                await method()
        await bench.pilot("awake")

    async def test_running_requests_continue_after_sleep_under_the_next_commit(self, sleeper: Bench) -> None:
        old = (await sleeper.serve("A")).version
        async with sleeper.long(*PROMPTS) as tasks:
            await sleeper.engine.sleep()
            await sleeper.engine.wake()
            new = (await sleeper.serve("B")).version
            await sleeper.pilot("after")
        found = [task.result() for task in tasks]
        assert [[version for _, version in completion.spans] for completion in found] == [[old, new]] * len(
            found
        )
        assert_switched(sleeper, found, [["A", "B"]] * len(found), recompute=True)

    async def test_nothing_is_generated_between_sleep_and_the_next_commit(self, sleeper: Bench) -> None:
        await sleeper.serve("A")
        async with asyncio.TaskGroup() as group:
            async with sleeper.long(PROMPTS[0]) as (running,):
                await sleeper.engine.sleep()
                late = group.create_task(sleeper.engine.generate(ask("late", PROMPTS[1], 8)), name="late")
                await _turns(sleeper)
                assert not running.done()
                assert not late.done()
                await sleeper.engine.wake()
                await _turns(sleeper)
                assert not running.done()
                assert not late.done()
                version = (await sleeper.serve("B")).version
                assert (await late).spans == ((8, version),)
        assert sleeper.follows([(8, "B")], PROMPTS[1], late.result().tokens, recompute=True)

    async def test_sleeping_engine_serves_nothing_and_accepts_no_version(self, sleeper: Bench) -> None:
        await sleeper.serve("A")
        staged = sleeper.publish("B")
        await sleeper.engine.stage(staged)
        await sleeper.engine.sleep()
        await sleeper.engine.sleep()
        assert sleeper.engine.served == Served()
        with pytest.raises(WeightError, match="sleeps"):
            await sleeper.engine.stage(staged)
        with pytest.raises(WeightError):
            await sleeper.engine.commit(staged)
        with pytest.raises(WeightError):
            await sleeper.engine.adopt("e2", 3)
        with pytest.raises(EngineError):
            await sleeper.engine.live_digest()
        await sleeper.engine.wake()
        await sleeper.engine.wake()
        assert sleeper.engine.served == Served()
        with pytest.raises(WeightError):  # what was staged before is gone
            await sleeper.engine.commit(staged)
        with pytest.raises(WeightError):
            await sleeper.engine.adopt("e2", 3)
        manifest = await sleeper.serve("B")
        assert sleeper.engine.served == Served("e1", manifest.version, manifest.digest)

    async def test_requests_can_be_ended_while_the_engine_sleeps(self, sleeper: Bench) -> None:
        version = (await sleeper.serve("A")).version
        async with asyncio.TaskGroup() as group:
            gone = group.create_task(sleeper.engine.generate(ask("gone", PROMPTS[1], LONG)), name="gone")
            async with sleeper.long(PROMPTS[0]) as (running,):
                await sleeper.engine.sleep()
                late = group.create_task(sleeper.engine.generate(ask("late", PROMPTS[1], 8)), name="late")
                await _turns(sleeper)
                await sleeper.engine.abort(["long0/0", "late/0"])
                found = await running
                gone.cancel()
        assert (found.finish_reason, found.spans) == ("abort", ((len(found.tokens), version),))
        assert gone.cancelled()
        assert late.result() == Completion((), (), (), "abort")
        await sleeper.engine.wake()
        await sleeper.serve("A")
        assert len((await sleeper.engine.generate(ask("gone", PROMPTS[1], 8))).tokens) == 8

    async def test_paused_engine_that_slept_stays_paused(self, sleeper: Bench) -> None:
        await sleeper.serve("A")
        await sleeper.engine.pause()
        await sleeper.engine.sleep()
        await sleeper.engine.wake()
        await sleeper.serve("A")
        async with asyncio.TaskGroup() as group:
            held = group.create_task(sleeper.engine.generate(ask("held", PROMPTS[0], 4)), name="held")
            await _turns(sleeper, resume=False)
            assert not held.done()
            await sleeper.engine.resume()

    async def test_sleep_is_refused_while_a_version_is_being_staged(self, sleeper: Bench) -> None:
        await sleeper.serve("A")
        manifest = sleeper.publish("B")
        async with asyncio.TaskGroup() as group:
            staging = group.create_task(sleeper.engine.stage(manifest), name="stage")
            await asyncio.sleep(0)
            with pytest.raises(WeightError, match="staged"):
                await sleeper.engine.sleep()
        await staging
        await sleeper.engine.commit(manifest)
        await sleeper.pilot("after")


async def _turns(bench: Bench, *, resume: bool = True) -> None:
    for _ in range(TURNS):
        await bench.engine.pause()
        if resume:
            await bench.engine.resume()
        await asyncio.sleep(0)
