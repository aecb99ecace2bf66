"""Tests that the lengths of drafts in vLLM's scheduler follow the switch."""

from types import SimpleNamespace

import pytest

from rollout.engines.draft_switch import BLOCK, DraftSwitch
from rollout.engines.vllm.drafts.scheduling import STEPS_BEHIND, switch_drafts

LENGTHS = [0, 3, 3]
"""By the size of the batch, as vLLM makes them for two requests."""


def lengths_of_steps(seconds: float, tokens: int, steps: int = 50 * BLOCK) -> list[int]:
    """Return the lengths of drafts at each step of two requests.

    Steps follow the lengths of two steps before, as those of a scheduler that is a step ahead.

    Args:
        seconds: of a step with drafts; the others take one.
        tokens: that a step with drafts gives a request.
        steps: how many are made.
    """
    now, results = 0.0, list[object]()
    scheduler = SimpleNamespace(
        dynamic_sd_lookup=LENGTHS, update_from_output=lambda *args: results.append(args)
    )
    switch_drafts(scheduler, DraftSwitch(lambda: now, skipped=STEPS_BEHIND))
    seen = [3, 3]
    for _ in range(steps):
        drafted = seen[-2] > 0
        now += seconds if drafted else 1.0
        scheduler.update_from_output(
            "scheduled", SimpleNamespace(sampled_token_ids=[[7] * (tokens if drafted else 1)] * 2)
        )
        seen.append(scheduler.dynamic_sd_lookup[2])
    assert len(results) == steps
    return seen[2:]


@pytest.mark.parametrize(("seconds", "tokens", "least", "most"), [(1.2, 3, 0.9, 1.0), (1.5, 1, 0.0, 0.15)])
def test_drafts_are_made_where_they_give_more_tokens_a_second(
    seconds: float, tokens: int, least: float, most: float
) -> None:
    lengths = lengths_of_steps(seconds, tokens)
    assert set(lengths) <= {0, 3}
    assert least <= sum(length > 0 for length in lengths) / len(lengths) <= most


def test_steps_without_requests_decide_nothing() -> None:
    seen = list[object]()
    scheduler = SimpleNamespace(dynamic_sd_lookup=LENGTHS, update_from_output=lambda *args: seen.append(args))
    switch_drafts(scheduler, DraftSwitch(lambda: 0.0))
    for _ in range(3 * BLOCK):
        scheduler.update_from_output("scheduled", SimpleNamespace(sampled_token_ids=[]))
    assert scheduler.dynamic_sd_lookup == LENGTHS
    assert len(seen) == 3 * BLOCK
