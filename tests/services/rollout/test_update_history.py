"""Random histories of weight updates: tokens are of the versions that they name, and every wait ends."""

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.services.bus.harness import DEADLINE_S
from tests.services.rollout.versions import Versions
from tests.services.rollout.world import MOVES, Move, World

STEPS = [Move("step"), Move("turns", count=20)]


@pytest.fixture(scope="module")
def versions() -> Versions:
    # on a busy machine, threads that wait for each other make small products a hundred times slower
    torch.set_num_threads(1)
    return Versions()


def play(
    versions: Versions, transport: str, moves: list[Move], until: Callable[[World], bool] = lambda world: True
) -> World:
    """Play the moves, repeatedly until `until` holds, and then settle."""

    async def main(directory: Path) -> World:
        async with asyncio.timeout(3 * DEADLINE_S), World(transport, directory, versions).running() as world:
            while True:
                for move in moves:
                    await world.play(move)
                if until(world):
                    break
            await world.settle()
        return world

    with tempfile.TemporaryDirectory() as directory:
        return asyncio.run(main(Path(directory)))


CHEAP = settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
DEEP = settings(CHEAP, max_examples=60)
TRANSPORTS = st.sampled_from(["shm", "disk", "nccl", "shared"])


@CHEAP
@example(
    transport="disk",
    moves=[
        *STEPS,
        *STEPS,
        Move("restart", "zombie", 2),
        *STEPS,
        Move("haunt"),
        *STEPS,
        Move("haunt"),
        *STEPS,
    ],
)
@example(
    transport="shm",
    moves=[*STEPS, Move("poison"), *STEPS, Move("step", "corrupt"), Move("step", "truncate"), *STEPS],
)
@example(
    transport="shm",
    moves=[
        *STEPS,
        Move("sleep"),
        *STEPS,
        Move("restart", "", 1),
        Move("wake"),
        *STEPS,
        Move("sleep"),
        Move("wake"),
    ],
)
@example(
    transport="nccl",
    moves=[
        *STEPS,
        Move("step", "swap"),
        *STEPS,
        Move("die", "writing"),
        Move("step", "swap"),
        Move("kill_engine"),
        *STEPS,
    ],
)
@example(
    transport="shared",
    moves=[
        *STEPS,
        Move("step"),
        Move("step"),
        Move("kill_engine"),
        *STEPS,
        Move("restart", "zombie", 1),
        *STEPS,
    ],
)
@example(
    transport="shared",
    moves=[*STEPS, Move("step", "corrupt"), *STEPS, Move("die", "written"), Move("poison"), *STEPS, *STEPS],
)
@given(transport=TRANSPORTS, moves=st.lists(MOVES, max_size=20))
def test_tokens_are_of_the_versions_that_they_name_whatever_happens(
    versions: Versions, transport: str, moves: list[Move]
) -> None:
    play(versions, transport, moves)


@pytest.mark.slow
@DEEP
@given(transport=TRANSPORTS, moves=st.lists(MOVES, max_size=40))
def test_tokens_are_of_the_versions_that_they_name_in_long_histories(
    versions: Versions, transport: str, moves: list[Move]
) -> None:
    play(versions, transport, moves)


@pytest.mark.parametrize("transport", ["shm", "disk", "nccl", "shared"])
def test_updates_in_the_middle_of_requests_are_seen(versions: Versions, transport: str) -> None:
    """Shows that the histories above contain what they are meant to check."""
    world = play(
        versions, transport, STEPS, until=lambda world: world.accepted > 0 and world.spans > world.checked
    )
    assert world.poisoned == 0


def test_versions_are_staged_while_they_are_made_and_what_has_another_digest_is_not_served(
    versions: Versions,
) -> None:
    for damage in ("", "swap"):
        moves = [Move("step", damage), Move("turns", count=20)]
        world = play(
            versions,
            "nccl",
            moves,
            until=lambda world: world.drafts > 2 and world.accepted > 2 and world.spans > world.checked,
        )
        assert world.poisoned == 0


def test_requests_live_through_the_sleep_of_their_engine(versions: Versions) -> None:
    moves = [*STEPS, Move("sleep"), *STEPS, Move("wake"), *STEPS]
    world = play(
        versions, "shm", moves, until=lambda world: world.accepted > 0 and world.spans > world.checked
    )
    assert world.poisoned == 0


def test_commit_that_breaks_poisons_the_engine(versions: Versions) -> None:
    play(versions, "shm", [*STEPS, Move("poison"), *STEPS], until=lambda world: world.poisoned > 0)
