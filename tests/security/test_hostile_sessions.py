"""Harnesses that attack the endpoint of a run in progress: the run continues, and their samples count."""

import asyncio
import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from rollout.engines.base import Completion
from rollout.environments.episode import Episode
from rollout.prompts.base import Prompt
from rollout.sessions.session import SessionLimits
from services.ledger.event_log.events import ExpireEvent
from services.ledger.event_log.reader import read_events
from services.ledger.verify.verifier import verify
from services.run_record.steps import read_steps
from tests.changes import slow_unless_changed
from tests.integration.loop import running, settings_for
from tests.rollout.sessions.chats import renderer
from tests.rollout.sessions.serving import USER, served
from tests.security.hostile_agent import post
from tests.security.hostile_requests import HOSTILE

MOST_S = 0.1
"""CPU time of the event loop's thread in which nothing else gets a turn."""
LONG = 12_000
"""Tokens of an answer to a hostile request."""


class Turns:
    """Turns of a task on the event loop, in CPU time: the load of the machine does not matter."""

    def __init__(self) -> None:
        self.longest = 0.0
        """Seconds that the event loop's thread computed between two turns."""

    async def watch(self) -> None:
        """Take a turn each millisecond."""
        last = time.thread_time()
        while True:
            await asyncio.sleep(0.001)
            now = time.thread_time()
            self.longest, last = max(self.longest, now - last), now


async def says_much(tokens: tuple[int, ...], max_tokens: int | None) -> Completion:
    """Answers a short context briefly, and others at length."""
    count = max_tokens or LONG
    return Completion((30,) * count, (-0.5,) * count, ((count, 0),), "stop")


async def play(client: openai.AsyncOpenAI) -> None:
    """Talk as a harness does, until it is cancelled."""
    messages: list[Any] = [USER]
    for _ in range(1000):
        answer = await client.chat.completions.create(model="m", messages=messages[-9:], max_tokens=4)
        messages += [{"role": "assistant", "content": answer.choices[0].message.content}, USER]


@pytest.fixture
def own_garbage() -> Iterator[None]:
    """Keeps the collector from the objects of earlier tests, of which it would go through all."""
    gc.freeze()
    yield
    gc.unfreeze()


@slow_unless_changed("rollout/sessions/", "tests/security/")
@pytest.mark.usefixtures("own_garbage")
@pytest.mark.parametrize(("max_model_len", "size"), [(4096, 10**7), (0, 4 * 10**5)])
async def test_a_hostile_request_leaves_the_event_loop_to_others(max_model_len: int, size: int) -> None:
    """The first session has the context of a model, the second one's requests are read to their end."""
    limits = SessionLimits(max_calls=1000)
    async with (
        served(says_much, limits, max_model_len=max_model_len) as (_, session, endpoint, key),
        served(says_much, limits) as (innocent, others, _, _),
        asyncio.TaskGroup() as tasks,
    ):
        own, late, played = endpoint.url(key).removesuffix("/v1"), {}, tasks.create_task(play(innocent))
        for what, (path, make) in HOSTILE.items():
            body = await asyncio.to_thread(make, size)
            turns = Turns()
            watched = tasks.create_task(turns.watch())
            status = await asyncio.to_thread(post, f"{own}/{path}", body)
            watched.cancel()
            assert status in (200, 400, 413), what
            late |= {what: turns.longest} if turns.longest > MOST_S else {}
        assert not session.ended
        played.cancel()
    assert not late
    assert len(others.tree.calls) > len(HOSTILE)


@pytest.mark.usefixtures("own_garbage")
async def test_a_huge_result_of_a_tool_leaves_the_event_loop_to_others() -> None:
    """An episode records it, and inserts it; without a limit of the context it is tokenized to its end."""
    text, turns = renderer("tool use"), Turns()
    prompt = Prompt("abc")
    episode = Episode(prompt, text.prompt_tokens(prompt), says_much, text)

    async def tool() -> list[str]:
        return ["\n" * 4_000_000, "1" * 300_000]

    async with asyncio.TaskGroup() as tasks:
        watched = tasks.create_task(turns.watch())
        await episode.generate()
        for result in await episode.once("tool", tool):
            episode.insert(result[:300_000])
        await episode.generate()
        watched.cancel()
    assert turns.longest < MOST_S


@slow_unless_changed("rollout/sessions/", "rollout/environments/", "services/rollout/", "tests/security/")
async def test_a_run_continues_whatever_comes_to_its_endpoint(tmp_path: Path) -> None:
    settings = settings_for(
        tmp_path / "run",
        "stragglers.toml",
        "run.steps=2",
        "bound.groups_per_step=2",
        "sampling.samples_per_prompt=2",
        "engine.straggler_share=0.0",
        'environment.name="agent"',
        'environment.options={function="tests.security.hostile_agent:attacks", body_mb=1}',
        "environment.attempts=1",
    )
    async with running(settings) as live:
        await live.trained.wait()
    steps = read_steps(settings.run_dir / "metrics.jsonl")
    assert [step["reward_mean"] for step in steps] == [1.0, 1.0]
    assert not [
        event for event in read_events(settings.run_dir / "audit.jsonl") if isinstance(event, ExpireEvent)
    ]
    result = verify(settings.run_dir / "audit.jsonl")
    assert result.ok, result.violations[:5]
    assert result.steps == 2
