"""Tests the records of vLLM's scheduler steps: sampled tokens, running requests, and their KV blocks."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollout.engines.requests import spans_from_marks
from rollout.engines.vllm.step_records import FINISHED_KEPT, SampledTokens, ScheduledRequests

Blocks = dict[str, list[int]]


def step(
    new: Blocks | None = None,
    cached: Blocks | None = None,
    resumed: tuple[str, ...] = (),
    finished: tuple[str, ...] = (),
) -> Any:
    """A step of one group of layers; no new blocks are None, as vLLM has it."""
    new, cached = new or {}, cached or {}
    return SimpleNamespace(
        finished_req_ids=set(finished),
        scheduled_new_reqs=[SimpleNamespace(req_id=name, block_ids=(ids,)) for name, ids in new.items()],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            new_block_ids=[(ids,) if ids else None for ids in cached.values()],
            resumed_req_ids=set(resumed),
        ),
        num_scheduled_tokens=dict.fromkeys([*new, *cached], 1),
    )


def readings(*steps: Any, blocks: int = 11) -> list[tuple[int, float | None]]:
    requests = ScheduledRequests()
    found = []
    for output in steps:
        requests.step(output)
        found.append((requests.running, requests.kv_use(blocks)))
    return found


def test_shared_blocks_count_once_and_ended_requests_hold_none() -> None:
    assert readings(
        step(new={"a": [1, 2], "b": [1, 3]}),
        step(cached={"a": [4], "b": []}),
        step(cached={"a": []}, finished=("b",)),
        step(finished=("a",)),
    ) == [(2, 0.3), (2, 0.4), (1, 0.3), (0, 0.0)]


def test_preempted_request_holds_only_the_blocks_that_it_is_given_again() -> None:
    assert readings(
        step(new={"a": [1, 2], "b": [3]}),
        step(cached={"b": []}),
        step(cached={"a": [5], "b": []}, resumed=("a",)),
    ) == [(2, pytest.approx(0.3)), (1, 0.1), (2, 0.2)]


def test_cache_without_blocks_has_no_share_in_use() -> None:
    assert readings(step(new={"a": []}), blocks=1) == [(1, None)]


def tokens_of(sampled: SampledTokens, number: str) -> tuple[list[int], list[float], Any]:
    """Tokens, log-probabilities and spans of a request."""
    ids, logprobs, marks = sampled.pop(number) or pytest.fail(f"nothing of {number}")
    tokens = np.frombuffer(ids, np.int32).tolist()
    return tokens, np.frombuffer(logprobs, np.float32).tolist(), spans_from_marks(marks, len(tokens))


def test_tokens_have_the_version_of_their_step_though_its_result_comes_after_a_commit() -> None:
    sampled = SampledTokens(1)
    sampled.begin_step(["a"])
    in_flight = sampled.version
    sampled.version = 2
    sampled.begin_step(["b"])
    sampled.add(["a"], [[7]], [-0.5], in_flight)
    sampled.add(["a", "b"], [[8], [9]], [-0.25, -1.0], 2)
    sampled.add(
        ["a", "b"], [[3], []], [-0.125, -2.0], 2
    )  # of a prompt that is not complete nothing is sampled
    assert tokens_of(sampled, "a") == ([7, 8, 3], [-0.5, -0.25, -0.125], ((1, 1), (3, 2)))
    assert tokens_of(sampled, "b") == ([9], [-1.0], ((1, 2),))


def test_request_that_began_behind_a_commit_has_none_of_the_step_before_it() -> None:
    sampled = SampledTokens(1)
    sampled.begin_step(["a:x-1f"])
    sampled.version = 2
    sampled.begin_step(["b:x-2f"])
    sampled.add(["a:x-1f"], [[7]], [-0.5], 1)
    sampled.version = 3
    sampled.add(["a:x-1f", "b:x-2f"], [[8], []], [-0.5, -0.5], 2)
    sampled.add(["a:x-1f", "b:x-2f"], [[9], [4]], [-0.5, -0.5], 3)
    assert tokens_of(sampled, "a")[2] == ((1, 1), (2, 2), (3, 3))
    assert tokens_of(sampled, "b")[2] == ((1, 3),)


def test_preempted_request_that_comes_as_a_new_one_keeps_its_tokens() -> None:
    sampled = SampledTokens(1)
    sampled.begin_step(["a"])
    sampled.add(["a"], [[7]], [-0.5], 1)
    sampled.begin_step(["a"])
    sampled.add(["a"], [[8]], [-0.5], 1)
    assert tokens_of(sampled, "a")[0] == [7, 8]


def test_step_in_flight_adds_nothing_to_a_request_that_ended_or_was_fetched() -> None:
    sampled = SampledTokens(1)
    sampled.begin_step(["a", "b"])
    sampled.add(["a", "b"], [[7], [8]], [-0.5, -0.5], 1)
    sampled.begin_step([], finished=["a"])
    assert tokens_of(sampled, "b")[0] == [8]
    sampled.add(["a", "b"], [[9], [9]], [-0.5, -0.5], 1)
    assert tokens_of(sampled, "a")[0] == [7]
    assert sampled.pop("a") is sampled.pop("b") is None


def test_requests_that_ended_unfetched_are_forgotten_in_their_order() -> None:
    sampled = SampledTokens(1)
    names = [str(number) for number in range(FINISHED_KEPT + 1)]
    sampled.begin_step(names)
    sampled.add(names, [[number] for number in range(len(names))], [0.0] * len(names), 1)
    sampled.begin_step([], finished=names)
    assert sampled.pop("0") is None
    assert tokens_of(sampled, "1")[0] == [1]
