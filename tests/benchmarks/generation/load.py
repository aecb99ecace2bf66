"""The requests of the benchmark, and how long an engine takes for them."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from rollout.engines.base import Request, Sampling

PROMPT = 64
"""Tokens of a prompt; no two begin alike."""
SHORTEST, LONGEST = 96, 288
"""Tokens of a completion, every length as often."""
ROUNDS = {32: 5, 128: 4, 512: 3}
"""Requests at a time -> how many times as many there are in all."""

Generate = Callable[[Request], Awaitable[int]]
"""Generates all tokens of a request and returns how many there are."""


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast an engine has answered the requests of one load."""

    running: int
    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens of completions a second, from the first request to the last answer."""
        return self.tokens / self.seconds


def requests_of(running: int, vocabulary: int, share: float = 1.0) -> list[Request]:
    """Return the requests of the load with so many at a time; each call returns the same.

    Args:
        running: requests at a time.
        vocabulary: of the model.
        share: of the usual lengths, less for a rehearsal.
    """
    drawn = random.Random(running)
    lengths = [int(share * drawn.randint(SHORTEST, LONGEST)) for _ in range(running * ROUNDS.get(running, 2))]
    return [
        Request(
            f"load{running}-{number}/0",
            tuple(drawn.randrange(1, vocabulary) for _ in range(PROMPT)),
            Sampling(max_tokens=length),
        )
        for number, length in enumerate(lengths)
    ]


async def rate_of(generate: Generate, requests: Sequence[Request], running: int) -> Rate:
    """Run requests, so many at a time.

    Raises:
        ValueError: an answer has fewer or more tokens than were asked for.
    """
    left = iter(requests)
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for place in range(running):
            group.create_task(_answer(generate, left), name=f"load-{place}")
    seconds = time.monotonic() - began
    return Rate(running, sum(request.sampling.max_tokens for request in requests), seconds)


async def _answer(generate: Generate, left: Iterator[Request]) -> None:
    for request in left:
        count = await generate(request)
        if count != request.sampling.max_tokens:
            raise ValueError(f"{request.id}: {count} tokens, {request.sampling.max_tokens} asked for")
