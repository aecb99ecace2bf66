"""Tests that every engine must pass with very many versions; see `rollout/engines/contract/suite.py`."""

import asyncio
import itertools
from collections.abc import Iterator

import msgspec
import pytest

from protocol.messages import WeightManifest
from rollout.engines.base import Completion, Request, Sampling
from rollout.engines.contract.bench import PROMPTS, Bench

COMMITS = 1000
PREFIX = tuple(range(20, 160))
"""What all prompts begin with: more than a block of any prefix cache."""
LOAD = 8
"""Requests that run at any time."""
CHECKED = 5
"""One in so many completions is computed again."""


class CommitContract:
    @pytest.mark.slow
    @pytest.mark.timeout(1800)
    async def test_a_thousand_commits_under_load_leave_every_token_exact(self, bench: Bench) -> None:
        versions = versions_of_two_models(bench)
        names = {}
        first, name = next(versions)
        names[first.version] = name
        await bench.engine.stage(first)
        await bench.engine.commit(first)
        ended: list[tuple[Request, Completion]] = []
        is_over = asyncio.Event()

        async def keep_running(place: int) -> None:
            for number in itertools.count():
                sampling = Sampling(max_tokens=8 + (place * 37 + number * 13) % 90)
                prompt = (*PREFIX, *PROMPTS[(place + number) % 3])
                request = Request(f"load{place}-{number}/0", prompt, sampling)
                ended.append((request, await bench.engine.generate(request)))
                if is_over.is_set():
                    return

        async with asyncio.TaskGroup() as group:
            for place in range(LOAD):
                group.create_task(keep_running(place), name=f"load{place}")
            for manifest, name in itertools.islice(versions, COMMITS):
                names[manifest.version] = name
                await bench.engine.stage(manifest)
                await bench.engine.commit(manifest)
            is_over.set()
        assert bench.engine.served.version == max(names)
        assert len(ended) > LOAD
        for request, completion in ended:
            found = [version for _, version in completion.spans]
            assert found == sorted(set(found))
            assert completion.spans[-1][0] == len(completion.tokens) == request.sampling.max_tokens
        for request, completion in ended[::CHECKED]:
            rows = [(end, names[version]) for end, version in completion.spans]
            bench.assert_switched_logprobs(rows, request.prompt, completion)


def versions_of_two_models(bench: Bench) -> Iterator[tuple[WeightManifest, str]]:
    """Yield versions with the weights of A and B in turn; they share the files of the first two."""
    if bench.shares:
        pytest.skip("versions come out of one set of masters")
    published = [(bench.publish(name), name) for name in "AB"]
    for manifest, name in itertools.cycle(published):
        bench.last += 1
        yield msgspec.structs.replace(manifest, version=bench.last), name
