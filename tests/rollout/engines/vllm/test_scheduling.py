"""Tests vLLM's scheduler: keys of prefixes follow the version, and lengths of drafts the switch."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rollout.engines.base import EngineConfig, KvPolicy
from rollout.engines.contract.bench import LONG, MAX_MODEL_LEN, Bench, ask
from rollout.engines.contract.models import tiny_model, weights
from rollout.engines.draft_switch import BLOCK, DraftSwitch
from rollout.engines.registry import make_engine
from rollout.engines.vllm.scheduling import STEPS_BEHIND, record_tokens, switch_drafts
from rollout.engines.vllm.step_records import RECORD, StepResult
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


@pytest.mark.engine  # vLLM is imported
@pytest.mark.parametrize("counts", [False, True])
def test_messages_without_answers_are_not_sent_unless_statistics_are_counted(counts: bool) -> None:
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

    tokens, core = list[int](), SimpleNamespace()
    request = SimpleNamespace(
        request_id="3:a",
        output_token_ids=tokens,
        sampling_params=SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY),
    )

    def update(scheduled: object, output: object) -> dict[int, EngineCoreOutputs]:
        tokens.append(7)
        reason = FinishReason.LENGTH if len(tokens) == 3 else None
        return {0: EngineCoreOutputs(outputs=[EngineCoreOutput("3:a", [7], finish_reason=reason)])}

    scheduler = SimpleNamespace(
        add_request=lambda request: None,
        update_from_output=update,
        log_stats=counts,
        running=[request],
        kv_cache_manager=SimpleNamespace(usage=0.25, block_pool=SimpleNamespace(num_gpu_blocks=5)),
    )
    record_tokens(core, scheduler)
    scheduler.add_request(request)
    sent = []
    for version in (1, 2, 2):
        output = SimpleNamespace(
            req_ids=["3:a"],
            req_id_to_index={"3:a": 0},
            sampled_token_ids=[[7]],
            logprobs=SimpleNamespace(logprobs=np.array([[-0.5]], np.float32)),
        )
        scheduled = SimpleNamespace(finished_req_ids=set(), scheduled_spec_decode_tokens={})
        sent.append(scheduler.update_from_output(scheduled, StepResult.take(output, version)))
    answers = [answer for found in sent for it in found.values() for answer in it.outputs]
    assert [answer.new_token_ids for answer in answers] == ([[7]] * 3 if counts else [[7, 7, 7]])
    assert [bool(found) for found in sent] == [counts, counts, True]
    assert answers[-1].kv_transfer_params[RECORD][1] == [(0, -1), (0, 1), (1, 2)]
    assert core.tether_occupancy(core) == (1, 0.25, None)
    assert core.tether_sampled(core, "3:a")[2] == [(0, -1), (0, 1), (1, 2)]


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
