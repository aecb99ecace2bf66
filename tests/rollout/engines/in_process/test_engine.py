"""Tests calls to an in-process engine that ends, or whose caller is cancelled, meanwhile."""

import asyncio
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import EngineError
from rollout.engines.base import EngineConfig, Request, Sampling
from rollout.engines.contract.models import tiny_model, write_shm
from rollout.engines.hf.engine import HFEngine
from rollout.engines.in_process.running_request import RunningRequest
from tests.rollout.staging.models import OLD


async def test_call_refuses_if_the_engine_ends_meanwhile(tmp_path: Path) -> None:
    """The engine's thread may end between the check that it lives and the hand-over of the call."""

    class Ending(HFEngine):
        async def check(self) -> None:
            await super().check()
            await self.close()

    tiny_model(1).config.save_pretrained(tmp_path)
    for ask in (
        lambda engine: engine.generate(Request("r/0", (1,), Sampling(4))),
        lambda engine: engine.pause(),
    ):
        engine = Ending(EngineConfig(name="hf"), tmp_path, "e")
        await engine.start()
        with pytest.raises(EngineError, match="closed"):
            async with asyncio.timeout(20):
                await ask(engine)


async def test_refusal_of_a_cancelled_call_is_not_reported_by_the_loop(tmp_path: Path) -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
    tiny_model(1).config.save_pretrained(tmp_path)
    engine = HFEngine(EngineConfig(name="hf"), tmp_path, "e")
    await engine.start()
    async with asyncio.TaskGroup() as tasks:
        with engine._wake:  # the decoding thread waits
            committing = tasks.create_task(
                engine.commit(write_shm(tmp_path / "v1", OLD, 1))
            )  # it was not staged
            await asyncio.sleep(0)
            committing.cancel()
            await asyncio.wait([committing])
    del committing  # with what it waited for
    await engine.close()
    await asyncio.sleep(0)
    gc.collect()
    assert complaints == []


@pytest.mark.parametrize("aborts", [True, False])
async def test_a_decoder_that_calls_through_the_event_loop_never_waits_for_it(
    tmp_path: Path, aborts: bool
) -> None:
    """Ranks of a model are called through the event loop, which calls the engine at the same time."""
    tiny_model(1).config.save_pretrained(tmp_path)
    engine = HFEngine(EngineConfig(name="hf"), tmp_path, "e")
    await engine.start()
    loop, forget = asyncio.get_running_loop(), engine._model.decoder.forget

    def forget_on_ranks(rows: Sequence[RunningRequest]) -> None:
        if rows:
            asyncio.run_coroutine_threadsafe(engine.abort(["none"]), loop).result(20)
        forget(rows)

    engine._model.decoder.forget = forget_on_ranks  # type: ignore[method-assign]
    try:
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(engine.generate(Request("r/0", (1,), Sampling(max_tokens=8))))
            if aborts:
                await asyncio.sleep(0)
                await engine.abort(["r/0"])
        assert len(running.result().tokens) <= 8
    finally:
        await engine.close()
