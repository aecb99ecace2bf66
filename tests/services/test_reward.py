"""The reward worker: what it shows of itself while it waits."""

import asyncio
import dataclasses
from pathlib import Path

import aiohttp

from protocol.topics import ROLLOUTS, SCORED, Role
from services import reward
from services.bus.sender import Sender
from services.ledger.embedded_server import EmbeddedServer
from services.runtime.process import open_process
from tests.integration.loop import settings_for
from tests.protocol.samples import ROLLOUT
from tests.services.bus.harness import DEADLINE_S, eventually


async def test_health_shows_whom_a_reward_worker_waits_for_and_who_waits_for_it(tmp_path: Path) -> None:
    """A rollout is scored and held, since there is no ingest that could acknowledge its score."""
    server = EmbeddedServer(tmp_path / "ledger")
    url = await server.start()
    settings = settings_for(tmp_path, "stragglers.toml")
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
                discover=lambda: process.discover(ROLLOUTS.name),
            ) as rollouts,
            asyncio.TaskGroup() as tasks,
        ):
            running = [
                tasks.create_task(reward.serve(process), name="reward"),
                tasks.create_task(rollouts.send(ROLLOUT), name="send"),
            ]
            await eventually(
                lambda: SCORED.name in process.edges and process.edges[SCORED.name]()["waiting"] == 1
            )
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"http://127.0.0.1:{process.info['http']}/health") as answer,
            ):
                health = await answer.json()
            for task in running:
                task.cancel()
        assert health["ok"] is True
        edges = health["edges"]
        assert edges["scored"] == {"topic": "scored", "outstanding": 1, "waiting": 1, "receivers": {}}
        assert edges["rollouts"]["held"] == 1
        assert edges["rollouts"]["senders"]["rollout.1"]["held"] == 1
    finally:
        await server.stop()
