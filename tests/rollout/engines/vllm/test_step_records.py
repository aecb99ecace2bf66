"""Tests the records of vLLM's scheduler steps: versions of tokens, running requests, and their KV blocks."""

from types import SimpleNamespace
from typing import Any

import pytest

from rollout.engines.vllm.step_records import ScheduledRequests, TokenVersions

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


def test_request_is_marked_at_its_first_step_after_a_change() -> None:
    marks = TokenVersions(1)
    marks.step([("a", 0)])
    marks.step([("a", 1)])
    marks.switch(2)
    marks.step([("b", 0)])  # "a" was preempted
    marks.step([("a", 2), ("b", 1)])
    marks.switch(3)
    marks.step([("b", 2)], finished=["a"])
    assert marks.of("a") == [(0, 1), (2, 2)]
    assert marks.of("b") == [(0, 2), (2, 3)]
    assert marks.of("c") == []
