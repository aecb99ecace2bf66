"""A rollout worker with a place for one group, whose harnesses wait for the test before each call but the
first, and the ledger that decides on it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from openai import APIStatusError, AsyncOpenAI

from protocol.codec import encode_payload
from protocol.messages import Call, Recall, Recalled, Rollout, ScoredRollout
from protocol.topics import CALLS, ROLLOUTS, Role, Topic
from rollout.engines.base import Completion, EngineConfig, Request
from rollout.engines.scripted import ScriptedEngine
from rollout.environments.session import SessionEnvironment, SessionOptions, Task
from rollout.prompts.base import PromptConfig
from rollout.prompts.registry import make_source
from services.bus.receiver import Receiver
from services.bus.sender import Sender
from services.ledger.interface import Lease, TakenBatch
from services.rollout.group_runner import GroupRunner
from services.runtime.process import Process
from tests.contracts.ledger_rig import Driver, Rig
from tests.integration.loop import settings_for
from tests.rollout.sessions.chats import renderer
from tests.services.bus.harness import eventually
from trainer.data.samples import check_scored

SAMPLES = 2


class Versioned(ScriptedEngine):
    """The scripted engine, which keeps what it answered, and under which version."""

    def __init__(self, config: EngineConfig, model_dir: Path, incarnation: str) -> None:
        super().__init__(config, model_dir, incarnation)
        self.calls: list[tuple[Request, Completion, int]] = []

    def serve(self, version: int) -> None:
        self._served = replace(self._served, epoch="e1", version=version)

    @property
    def running(self) -> int:
        return len(self._running)

    async def abort_all(self) -> None:
        await self.abort(list(self._running))

    async def generate(self, request: Request) -> Completion:
        version = self._served.version
        completion = await super().generate(request)
        self.calls.append((request, completion, version))
        return completion


class Paced(SessionEnvironment):
    """A harness that makes so many calls, each but the first when it is let: as if a tool took that long."""

    def __init__(self, calls: int) -> None:
        super().__init__(SessionOptions())
        self._calls = calls
        self.in_tool = 0
        """Harnesses that wait."""
        self.answered = 0
        self.may_call = asyncio.Semaphore(0)
        self.refused: list[tuple[int, str]] = []

    async def act(self, task: Task) -> float:
        async with AsyncOpenAI(base_url=task.url, api_key=task.key) as client:
            messages = task.as_json()["messages"]
            for number in range(self._calls):
                if number:
                    self.in_tool += 1
                    await self.may_call.acquire()
                    self.in_tool -= 1
                try:
                    answer = await client.chat.completions.create(model="policy", messages=messages)
                except APIStatusError as refused:
                    self.refused.append((refused.status_code, refused.message))
                    raise
                self.answered += 1
                messages += [answer.choices[0].message, {"role": "user", "content": "more"}]
        return float(len(messages))

    async def next_calls(self) -> None:
        """Let every harness make its next call, and wait for the answers."""
        await eventually(lambda: self.in_tool == SAMPLES)
        answered = self.answered + SAMPLES
        for _ in range(SAMPLES):
            self.may_call.release()
        await eventually(lambda: self.answered == answered)


class SessionWorld:
    """Worker, engine, ledger, and another engine whose groups make the steps between."""

    def __init__(self, rig: Rig, folder: Path, calls: int, overrides: tuple[str, ...]) -> None:
        (folder / "config.json").write_text(json.dumps({"vocab_size": 280}))
        (folder / "prompts.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n')
        settings = settings_for(
            folder / "run", "stragglers.toml", "rollout.groups_in_flight=1", "rollout.drain_s=0",
            f"sampling.samples_per_prompt={SAMPLES}", *overrides,
        )  # fmt: skip
        self.driver, self.ledger = Driver(rig), rig.ledger
        self.process = Process(Role.ROLLOUT, settings, cast(Any, rig.ledger), "rollout.0")
        self.engine = Versioned(EngineConfig(name="scripted", max_model_len=512), folder, "engine.0")
        self.environment = Paced(calls)
        self._prompts = make_source(PromptConfig(path=str(folder / "prompts.jsonl"), shuffle=False))
        self.refusal = ""
        """What the ingest says to the second calls; empty: calls are not recorded."""
        self.runner: GroupRunner
        self.receiver: Receiver

    @asynccontextmanager
    async def running(self, **bound: Any) -> AsyncIterator["SessionWorld"]:
        """Run the worker; it holds group 0 and its first calls are answered under version 0."""
        await self.engine.start()
        await self.driver.begin(engines=("eng",), **bound)
        await self.serve(0)
        async with AsyncExitStack() as stack:
            self.receiver, sender = await self._edge(stack, ROLLOUTS)
            ingest, calls = await self._edge(stack, CALLS) if self.refusal else (None, None)
            self.runner = GroupRunner(
                self.process,
                self.engine,
                renderer("tool use"),
                self.environment,
                self._prompts,
                sender,
                calls,
            )
            try:
                async with asyncio.TaskGroup() as tasks:
                    recording = tasks.create_task(self._record_loop(ingest)) if ingest else None
                    running = tasks.create_task(self.runner.run(), name="runner")
                    await eventually(lambda: self.environment.in_tool == SAMPLES)
                    yield self
                    self.process.stop.set()
                    await running
                    if recording is not None:
                        recording.cancel()
            finally:
                await self.environment.close()
                await self.engine.close()

    async def _edge(self, stack: AsyncExitStack, topic: Topic) -> tuple[Receiver, Sender]:
        """Open both ends of an edge of the worker."""
        identity: dict[str, Any] = {"run": self.process.run, "config": self.process.settings.bus}
        receiver = await stack.enter_async_context(Receiver(topic, incarnation="receiver.0", **identity))

        async def discover() -> dict[str, str]:
            return {"receiver.0": receiver.endpoint}

        sender = Sender(
            topic, incarnation=self.process.incarnation, role=Role.ROLLOUT, discover=discover, **identity
        )
        return receiver, await stack.enter_async_context(sender)

    async def _record_loop(self, ingest: Receiver) -> None:
        """Take the first call of each sample, and refuse the second ones, once each."""
        refused: set[int] = set()
        while True:
            delivery = await ingest.receive()
            message = delivery.message
            if isinstance(message, Recall):
                ingest.answer(delivery, encode_payload(Recalled()))
            elif isinstance(message, Call) and message.number == 1 and message.sample not in refused:
                refused.add(message.sample)
                ingest.refuse(delivery, self.refusal)
            else:
                ingest.ack(delivery)

    async def serve(self, version: int) -> None:
        """Let the worker's engine serve a committed version."""
        self.engine.serve(version)
        await self.ledger.applied(self.process.incarnation, "e1", version)

    async def other_group(self) -> Lease:
        """Have a group of another engine scored, all of whose tokens are of the version that it serves."""
        lease = await self.driver.lease()
        await self.ledger.accept(lease.group, lease.token, {lease.version: 10})
        return lease

    async def step(self) -> TakenBatch:
        """Make a step of a group of another engine; both engines serve its version."""
        await self.other_group()
        taken = await self.ledger.take("e1")
        version = await self.driver.commit(taken)
        await self.ledger.applied("eng", "e1", version)
        await self.serve(version)
        return taken

    async def scored(self, version: int) -> ScoredRollout:
        """Receive the worker's group, and have it accepted as the ingest does."""
        delivery = await self.receiver.receive()
        rollout = delivery.message
        assert isinstance(rollout, Rollout)
        assert rollout.environment_rewards is not None
        scored = ScoredRollout(rollout=rollout, rewards=rollout.environment_rewards)
        await self.ledger.accept(rollout.group, rollout.token, check_scored(scored, version))
        self.receiver.ack(delivery)
        return scored
