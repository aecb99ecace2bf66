"""Tests vLLM's scheduler: keys of prefixes follow the version, and lengths of drafts the switch."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollout.engines.base import EngineConfig, KvPolicy
from rollout.engines.contract.bench import LONG, MAX_MODEL_LEN, Bench, ask
from rollout.engines.contract.models import tiny_model, weights
from rollout.engines.draft_switch import BLOCK, DraftSwitch
from rollout.engines.registry import make_engine
from rollout.engines.vllm.scheduling import STEPS_BEHIND, switch_drafts
from tests.changes import VLLM, slow_unless_changed
from tests.contracts.vllm_overlap import started

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


@pytest.mark.engine
@slow_unless_changed(*VLLM)
async def test_requests_that_wait_for_a_place_share_prefixes_of_the_version_that_they_begin_under(
    tmp_path: Path,
) -> None:
    config = EngineConfig(max_model_len=MAX_MODEL_LEN, max_running=1, kv=KvPolicy.KEEP)
    models = {"A": tiny_model(1), "B": tiny_model(2)}
    models["A"].save_pretrained(tmp_path / "model")
    published = {name: weights(model) for name, model in models.items()}
    prompt = tuple(range(4, 432))
    async with started(make_engine(config, tmp_path / "model", "e")) as engine:
        bench = Bench(engine, config.kv, models, tmp_path, published)
        await bench.serve("A")
        await engine.generate(ask("warm", prompt, 4))
        async with asyncio.TaskGroup() as group:
            lengths = {"running": LONG, "one": 16, "two": LONG - len(prompt), "three": 16}
            tasks = [
                group.create_task(engine.generate(ask(name, prompt if length < LONG else (5,), length)))
                for name, length in lengths.items()
            ]
            await bench.turns()
            versions = [(await bench.serve("B")).version]
            await engine.abort(["running/0"])
            await tasks[1]
            await bench.turns()  # the next one begins
            versions.append((await bench.serve("A")).version)
            await bench.turns()
            await engine.abort(["two/0"])
    _, one, two, three = [task.result() for task in tasks]
    assert (one.cached_tokens, three.cached_tokens) == (0, 0)
    assert two.cached_tokens > 256  # of the prefix that the one before it left
    assert [[version for _, version in found.spans] for found in (one, two, three)] == [
        versions[:1],
        versions,
        versions[1:],
    ]
    names = dict(zip(versions, "BA", strict=True))
    for found in (one, two, three):
        rows = [(end, names[version]) for end, version in found.spans]
        bench.assert_switched_logprobs(rows, prompt, found)
