"""The sandbox of an episode whose worker is lost continues where the record ends."""

import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from rollout.sandboxes.bubblewrap import BubblewrapProvider
from rollout.sandboxes.pool import SandboxPool
from rollout.sandboxes.world import World
from rollout.tools.in_world import in_world
from tests.contracts.sandbox_suite import CONFIG

pytestmark = pytest.mark.xdist_group("sandbox")


class Record:
    """Results of an episode by name, as JSON, over several workers."""

    def __init__(self) -> None:
        self.results: dict[str, str] = {}

    async def once(self, name: str, work: Callable[[], Awaitable[Any]]) -> Any:
        if name not in self.results:
            self.results[name] = json.dumps(await work())
        return json.loads(self.results[name])


async def attempt(record: Record, lines: list[str], every: int) -> list[str]:
    """Play an episode of command lines in a new sandbox, and return the answers."""
    pool = SandboxPool(BubblewrapProvider(CONFIG), 1)
    answers = []
    async with World(pool, replace(CONFIG, snapshot_calls=every), 300, record.once) as world:
        shell = in_world("shell", world, 60, 1 << 14)
        for number, line in enumerate(lines):

            async def run(line: str = line) -> tuple[str, str]:
                return await shell.run(line), shell.kept

            answer, kept = await record.once(f"call {number}", run)
            shell.restore(line, kept)
            answers.append(answer)
    return answers


@pytest.mark.parametrize(("every", "random"), [(0, False), (1, True), (2, False), (3, True)])
async def test_the_next_worker_s_sandbox_has_the_files_of_the_lost_one(every: int, random: bool) -> None:
    """With a snapshot after the command whose output nobody can repeat, its files are the same bytes."""
    record = Record()
    begun = ["echo 1 > f", "cat f", "head -c 8 /dev/urandom | od -An -tx1 | tee g"]
    first = await attempt(record, begun, every)
    later = await attempt(record, [*begun, "cat f g; echo 2 > f", "cat f"], every)
    assert later[:3] == first
    assert later[3].startswith("1\n")
    assert later[4] == "2"
    if random:
        assert later[3] == f"1\n{first[2]}"
    starts = {name: json.loads(said) for name, said in record.results.items() if name.startswith("sandbox")}
    again = {0: 3, 1: 0, 2: 1, 3: 0}[every]
    assert starts == {
        "sandbox after 0 calls": {"sandbox": "process", "commands_again": 0},
        "sandbox after 3 calls": {"sandbox": "process", "commands_again": again},
    }


async def test_an_episode_without_commands_has_no_sandbox() -> None:
    record = Record()
    assert await attempt(record, [], 1) == []
    assert record.results == {}
