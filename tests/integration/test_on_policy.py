"""At E = 0 engine and trainer agree: real engines and real Megatron-core, fp32, over six versions that the
trainer makes.

The trainer's log-probabilities of an engine's tokens equal the engine's within 1e-4; those of the version
before differ by more than 1e-2, so the agreement could not come from an engine that missed an update.
"""

import random
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from protocol.messages import ScoredRollout
from protocol.tensors import Array
from protocol.weights.lora import NO_ADAPTERS, LoraConfig
from rollout.config import EnvironmentConfig
from rollout.engines.base import Engine, EngineConfig, Sampling
from rollout.engines.registry import make_engine
from rollout.environments.registry import make_environment
from rollout.generate import generate_group
from rollout.prompts.base import Prompt
from rollout.render import RenderConfig, Renderer
from tests.changes import VLLM, slow_unless_changed
from tests.contracts.sglang_environment import sglang_settings
from tests.trainer.groups import whole
from trainer.algorithms.registry import make_algorithm
from trainer.batch import Batch
from trainer.config import (
    AlgorithmConfig,
    OptimizerConfig,
    ParallelConfig,
    ScratchConfig,
    TrainerConfig,
    WeightConfig,
)
from trainer.lora import as_published
from trainer.megatron.backend import MegatronBackend
from trainer.random_model import build_scratch
from trainer.step.plan import plan_step
from trainer.weights.files import disk_sender

VERSIONS = 6
GROUPS, SAMPLES, TOKENS = 4, 4, 12

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore:.*torch.distributed.reduce_op.*")]


async def scored_groups(engine: Engine, renderer: Renderer, version: int) -> list[tuple[ScoredRollout, int]]:
    """Groups generated now, with made-up rewards."""
    environment, dice = make_environment(EnvironmentConfig()), random.Random(version)
    groups = []
    for group in range(GROUPS):
        prompt = Prompt(f"{dice.randrange(1000):03}=")
        rollout = await generate_group(
            engine,
            renderer,
            environment,
            prompt,
            group=group,
            token=f"v{version}",
            n=SAMPLES,
            engine_name="e",
            sampling=Sampling(TOKENS),
        )
        rewards = Array.of([float(sample % 2) for sample in range(SAMPLES)], "float32")
        groups.append((ScoredRollout(rollout=rollout, rewards=rewards), 0))
    return groups


def largest_difference(batch: Batch, logprobs: torch.Tensor) -> float:
    """Over all sampled tokens."""
    return float((logprobs - batch.behaviour_logprobs)[batch.sampled_mask].abs().max())


@torch.no_grad()
def under(model: torch.nn.Module, weights: Mapping[str, torch.Tensor], batch: Batch) -> torch.Tensor:
    """Log-probabilities [t] of a batch under other weights, by plain transformers, a sample at a time."""
    model.load_state_dict(dict(weights))
    found = []
    for tokens in batch.tokens.long().split(batch.lengths.tolist()):
        logits = model(tokens[None]).logits[0, :-1].float()
        chosen = torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0]
        found.append(torch.nn.functional.pad(chosen, (1, 0)))
    return torch.cat(found)


@pytest.mark.parametrize(
    ("name", "lora"),
    [
        pytest.param(
            "vllm",
            NO_ADAPTERS,
            id="whole",
            marks=[
                pytest.mark.xdist_group("vllm-recompute"),  # the process in which the contract imports vLLM
                slow_unless_changed(*VLLM, "trainer/megatron/", "trainer/layers/"),
            ],
        ),
        pytest.param("vllm", LoraConfig(rank=8), id="lora", marks=pytest.mark.slow),
        pytest.param("megatron", NO_ADAPTERS, id="megatron"),
        pytest.param(
            "sglang", LoraConfig(rank=8), id="sglang-lora", marks=[pytest.mark.slow, pytest.mark.timeout(900)]
        ),
    ],
)
async def test_engine_and_trainer_agree_on_every_version(tmp_path: Path, name: str, lora: LoraConfig) -> None:
    model_dir = build_scratch(
        ScratchConfig(vocabulary="0123456789= ", initializer_range=0.1, max_position_embeddings=64),
        tmp_path / "model",
    )
    own = sglang_settings() if name == "sglang" else {}
    engine = make_engine(EngineConfig(name=name, max_model_len=64, **own), model_dir, "e", lora)
    renderer = Renderer(model_dir, RenderConfig(stop_at_eos=False))
    algorithm = make_algorithm(AlgorithmConfig())
    sender = disk_sender(WeightConfig(), tmp_path)
    await engine.start()
    backend = MegatronBackend(
        model_dir,
        parallel=ParallelConfig(),
        optimizer=OptimizerConfig(lr=3e-2 if lora.rank else 3e-3),
        trainer=TrainerConfig(micro_batch_size=8),
        algorithm=algorithm,
        adapters=lora,
    )
    reference, before = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval(), None
    try:
        for version in range(VERSIONS):
            weights = {name: tensor.clone() for name, tensor in backend.export_model()}
            published = as_published(backend.export(), backend.targets, lora)
            manifest = sender.publish("epoch", version, published, base_model=backend.architecture)
            await engine.stage(manifest)
            await engine.commit(manifest)
            groups = await scored_groups(engine, renderer, version)
            plan = plan_step(groups, step=version, algorithm=algorithm, mask_late=False)
            batch = whole(plan)
            assert plan.stats.trained_tokens == GROUPS * SAMPLES * TOKENS
            assert largest_difference(batch, backend.logprobs(batch)) < 1e-4
            if before is not None:
                assert largest_difference(batch, under(reference, before, batch)) > 1e-2
            assert backend.train_step(batch).logprob_error_max < 1e-4
            before = weights
    finally:
        await engine.close()
        backend.close()
        sender.close()
