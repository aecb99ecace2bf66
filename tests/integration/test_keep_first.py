"""A run that begins more samples than it trains: the first to finish are kept, and all tokens are counted."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from protocol.codec import decode_payload
from protocol.messages import ScoredRollout
from protocol.rollout_view import cancelled_lengths
from rollout.engines.base import EngineConfig, Sampling
from rollout.engines.contract.models import write_shm
from rollout.engines.registry import make_engine
from rollout.environments.base import Environment
from rollout.generate import generate_group
from rollout.prompts.base import Prompt
from rollout.render import RenderConfig, Renderer
from rollout.sample import Generate, Sample, SampleBuilder
from services.tools.replay import replay_step
from services.tools.verification import verify_run
from tests.changes import VLLM, slow_unless_changed
from tests.integration.loop import run_to_end, settings_for
from trainer.config import ScratchConfig
from trainer.random_model import build_scratch
from trainer.storage.archive import Archive

STEPS, B, N, K = 6, 4, 4, 2
VLLM_CHANGED = (
    slow_unless_changed(*VLLM, "rollout/generate.py", "tests/integration/test_keep_first.py"),
    pytest.mark.xdist_group("vllm-recompute"),
)


async def test_the_slowest_samples_are_cancelled_and_their_tokens_counted(tmp_path: Path) -> None:
    settings = settings_for(
        tmp_path / "run", "stragglers.toml", f"run.steps={STEPS}", f"bound.groups_per_step={B}",
        "trainer.step_s=0", "trainer.checkpoint_every=3", "engine.seconds_per_token=0.02",
        "engine.straggler_share=0", "reward.verifiers=[]", f"sampling.samples_per_prompt={N}",
        f"sampling.keep_first={K}", 'environment.name="tests.integration.uneven_turns:play"',
        'bound.staleness_policy="wait"', "trainer.archive_mb=100",
    )  # fmt: skip
    run = await run_to_end(settings)
    assert run.audit.violations == []
    assert [step["groups"] for step in run.steps] == [B] * STEPS
    assert [step["cancelled_samples"] for step in run.steps] == [B * (N - K)] * STEPS
    for step in run.steps:
        assert step["masked_tokens"] == 0
        assert step["cancelled_length_mean"] == step["cancelled_tokens"] / step["cancelled_samples"]
    # of lengths 1 to 4 the two shorter ones are kept
    lengths = sum(step["response_length_mean"] for step in run.steps) / STEPS
    assert lengths < 2.5

    facts = verify_run(settings.run_dir)
    assert facts["violations"] == []
    assert facts["cancelled_samples"] >= B * (N - K) * STEPS
    told = [step["cancelled_tokens"] for step in run.steps]
    assert [tokens_of(settings.run_dir, step) for step in range(3)] == told[:3]
    assert facts["cancelled_tokens"] >= sum(told)
    assert replay_step(settings, 1, train=False)["equal"]

    path = settings.run_dir / "metrics.jsonl"
    path.write_text(path.read_text().replace(f'"cancelled_tokens":{told[4]}', '"cancelled_tokens":1'))
    steps = [violation.partition(":")[0] for violation in verify_run(settings.run_dir)["violations"]]
    assert "step 4" in steps


class Lengths(Environment):
    """Its i-th sample is as long as the i-th number says."""

    def __init__(self, *tokens: int) -> None:
        self._tokens = iter(tokens)

    async def run(
        self, prompt: Prompt, prompt_tokens: tuple[int, ...], generate: Generate, renderer: Renderer
    ) -> Sample:
        completion = await generate(prompt_tokens, next(self._tokens))
        sample = SampleBuilder()
        sample.sampled(completion)
        return sample.finish(completion.finish_reason)


@pytest.mark.engine
@pytest.mark.parametrize("name", ["hf", pytest.param("vllm", marks=VLLM_CHANGED)])
async def test_an_engine_says_what_the_samples_had_that_it_ran_and_those_that_waited(
    tmp_path: Path, name: str
) -> None:
    model_dir = build_scratch(
        ScratchConfig(vocabulary="0123456789= ", max_position_embeddings=512), tmp_path / "model"
    )
    engine = make_engine(EngineConfig(name=name, max_model_len=512, max_running=2), model_dir, "e")
    renderer = Renderer(model_dir, RenderConfig(stop_at_eos=False))
    try:
        await engine.start()
        version = write_shm(tmp_path / "v0", load_file(model_dir / "model.safetensors"), 0)
        await engine.stage(version)
        await engine.commit(version)
        rollout = await generate_group(
            engine, renderer, Lengths(400, 4, 4, 400), Prompt("1="), group=0, token="t", n=4, keep=2,
            engine_name="e", sampling=Sampling(400),
        )  # fmt: skip
        assert rollout.lengths.numpy().tolist() == [4, 4]
        assert rollout.cancelled is not None
        waited, ran = sorted(rollout.cancelled.numpy().tolist())
        assert 0 <= waited < ran < 400
        # nothing runs any more
        again = await generate_group(
            engine, renderer, Lengths(3, 3), Prompt("2="), group=1, token="t", n=2, engine_name="e",
            sampling=Sampling(400),
        )  # fmt: skip
        assert again.lengths.numpy().tolist() == [3, 3]
        assert again.cancelled is None
    finally:
        await engine.close()


def tokens_of(run_dir: Path, step: int) -> int:
    """Tokens of cancelled samples in the archived records of a step."""
    total = 0
    for record in Archive(run_dir / "archive", 100).records(step):
        message = decode_payload(record.payload)
        assert isinstance(message, ScoredRollout)
        total += sum(cancelled_lengths(message.rollout))
    return total
