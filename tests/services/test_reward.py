"""The reward worker: what it shows of itself while it waits, and what ends one group alone."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec

from protocol.codec import encode
from protocol.messages import ScoredRollout, ScoreFailure
from protocol.topics import ROLLOUTS, SCORED, Role
from services import reward
from services.bus.receiver import Receiver
from services.bus.sender import Sender
from services.ledger.embedded_server import EmbeddedServer
from services.run_record.progress import FAILED
from services.runtime.process import Process, open_process
from services.settings.sections import Settings
from tests.integration.loop import settings_for
from tests.protocol.samples import ROLLOUT
from tests.services.bus.harness import DEADLINE_S, eventually

GROUP_8 = msgspec.structs.replace(ROLLOUT, group=8, responses=("a" * 300, "c"))


@asynccontextmanager
async def served(settings: Settings) -> AsyncIterator[tuple[Process, Sender, asyncio.TaskGroup]]:
    """Run a reward worker, with a sender of rollouts; all tasks are cancelled at the end of the block."""
    server = EmbeddedServer(settings.run_dir / "ledger")
    url = await server.start()
    settings = dataclasses.replace(settings, ledger=dataclasses.replace(settings.ledger, url=url))
    try:
        async with (
            asyncio.timeout(DEADLINE_S),
            open_process(Role.REWARD, settings, "reward.0") as process,
            Sender(
                ROLLOUTS,
                run=process.run,
                incarnation="rollout.1",
                role=Role.ROLLOUT,
                config=settings.bus,
                discover=lambda: process.ledger.endpoints(ROLLOUTS.name),
            ) as rollouts,
            asyncio.TaskGroup() as tasks,
        ):
            serving = tasks.create_task(reward.serve(process), name="reward")
            yield process, rollouts, tasks
            serving.cancel()
    finally:
        await server.stop()


async def test_health_shows_whom_a_reward_worker_waits_for_and_who_waits_for_it(tmp_path: Path) -> None:
    """A rollout is scored and held, since there is no ingest that could acknowledge its score."""
    async with served(settings_for(tmp_path, "stragglers.toml")) as (process, rollouts, tasks):
        sending = tasks.create_task(rollouts.send(ROLLOUT), name="send")
        await eventually(
            lambda: SCORED.name in process.edges and process.edges[SCORED.name]()["waiting"] == 1
        )
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{process.info['http']}/health") as answer,
        ):
            health = await answer.json()
        sending.cancel()
    assert health["ok"] is True
    edges = health["edges"]
    assert edges["scored"] == {"topic": "scored", "outstanding": 1, "waiting": 1, "receivers": {}}
    assert edges["rollouts"]["held"] == 1
    assert edges["rollouts"]["senders"]["rollout.1"]["held"] == 1


async def test_a_group_that_its_scores_make_too_large_for_a_frame_is_one_failure(tmp_path: Path) -> None:
    """The rollout fits; what the ingest gets is that it failed, and the worker scores the next group."""
    settings = settings_for(tmp_path, "stragglers.toml")
    limit = len(encode(GROUP_8, run=settings.run.name, id="8" * 16))
    settings = dataclasses.replace(settings, bus=dataclasses.replace(settings.bus, max_frame_bytes=limit))
    async with served(settings) as (process, rollouts, tasks):
        async with (
            open_process(Role.INGEST, process.settings, "ingest.0") as ingest,
            Receiver(SCORED, run=ingest.run, incarnation=ingest.incarnation, config=settings.bus) as scored,
        ):
            ingest.info["endpoints"] = {SCORED.name: scored.endpoint}
            await ingest.register()
            sending = tasks.create_task(rollouts.send(GROUP_8, id="8" * 16, group=8), name="send-8")
            failed = await scored.receive()
            assert isinstance(failed.message, ScoreFailure)
            assert (failed.message.group, failed.message.token) == (8, GROUP_8.token)
            assert f"raise setting bus.max_frame_bytes, {limit} (at most " in failed.message.error
            assert process.info[FAILED] == f"reward: {failed.message.error}"
            scored.ack(failed)
            await sending  # acknowledged, so it is not sent to another worker
            sending = tasks.create_task(rollouts.send(ROLLOUT, group=7), name="send-7")
            delivery = await scored.receive()
            assert isinstance(delivery.message, ScoredRollout)
            scored.ack(delivery)
            await sending
