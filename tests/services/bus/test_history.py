"""Random histories of the bus: what is acknowledged took effect exactly once, and nothing is left behind."""

import asyncio

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.services.bus.harness import DEADLINE_S
from tests.services.bus.history import MOVES, Move, World


def play(window: int, moves: list[Move]) -> None:
    async def main() -> None:
        async with asyncio.timeout(2 * DEADLINE_S), World(window).running() as world:
            for move in moves:
                await world.play(move)
            await world.settle()

    asyncio.run(main())


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(window=st.sampled_from([0, 0, 1, 3]), moves=st.lists(MOVES, max_size=20))
def test_every_message_takes_effect_once_whatever_happens(window: int, moves: list[Move]) -> None:
    play(window, moves)
