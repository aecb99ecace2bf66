"""Measures what routing replay does to the mismatch of engine and trainer, on a random mixture of experts.

The engine `hf` samples in bfloat16 from a model of 6 layers with 32 experts each, 4 for a token; the Megatron
trainer computes the log-probabilities of these tokens, with its own choice of experts and with the engine's.

    python -m tests.benchmarks.routing_replay
"""

import asyncio
import dataclasses
import tempfile
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from protocol.messages import ScoredRollout
from protocol.tensors import Array
from rollout.engines.base import Completion, EngineConfig, Request, Sampling
from rollout.engines.hf.engine import HFEngine
from rollout.prompts.base import Prompt
from rollout.sample import SampleBuilder
from rollout.trajectory import assemble
from trainer.algorithms import Algorithm, AlgorithmConfig, make_algorithm
from trainer.backends.base import StepStats
from trainer.batch import Batch
from trainer.config import OptimizerConfig, ParallelConfig, TrainerConfig
from trainer.megatron.backend import MegatronBackend
from trainer.step.plan import plan_step

SAMPLES, PROMPT, RESPONSE = 32, 8, 128
SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}


def save_model(directory: Path) -> None:
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.06)
    model.save_pretrained(directory)


def prompt_of(sample: int) -> tuple[int, ...]:
    return tuple(range(1 + sample, 1 + sample + PROMPT))


async def generate(model_dir: Path) -> list[Completion]:
    config = EngineConfig(
        name="hf",
        dtype="bfloat16",
        max_model_len=PROMPT + RESPONSE,
        max_running=SAMPLES,
        enable_return_routed_experts=True,
    )
    engine = HFEngine(config, model_dir, "engine.0")
    await engine.start()
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(
                engine.generate(Request(str(i), prompt_of(i), Sampling(max_tokens=RESPONSE, seed=i))),
                name=f"sample-{i}",
            )
            for i in range(SAMPLES)
        ]
    await engine.close()
    return [task.result() for task in running]


def batch_of(completions: list[Completion], algorithm: Algorithm) -> Batch:
    groups = []
    for i, completion in enumerate(completions):
        builder = SampleBuilder()
        builder.sampled(dataclasses.replace(completion, spans=((RESPONSE, 0),)))
        rollout = assemble(
            Prompt("", index=i), prompt_of(i), [builder.finish("length")], [""],
            group=i, token="t", engine="e", generate_s=1.0,
        )  # fmt: skip
        groups.append((ScoredRollout(rollout=rollout, rewards=Array.of([float(i % 2)], "float32")), 0))
    return plan_step(groups, step=0, algorithm=algorithm).part(range(SAMPLES))


def measure(model_dir: Path, batch: Batch, algorithm: Algorithm, **trainer: object) -> StepStats:
    backend = MegatronBackend(
        model_dir,
        parallel=ParallelConfig(),
        optimizer=OptimizerConfig(),
        trainer=TrainerConfig(device="cpu", **trainer),  # type: ignore[arg-type]
        algorithm=algorithm,
    )
    stats = backend.train_step(batch)
    backend.close()
    return stats


def main() -> None:
    algorithm = make_algorithm(AlgorithmConfig(name="reinforce_plus_plus"))
    with tempfile.TemporaryDirectory(prefix="tether-routing-replay-") as directory:
        model_dir = Path(directory)
        save_model(model_dir)
        batch = batch_of(asyncio.run(generate(model_dir)), algorithm)
        print("| trainer | experts | mean | largest | KL(engine to trainer) | effective sample size |")
        print("|---|---|---|---|---|---|")
        for dtype in ("float32", "bfloat16"):
            for replay in (False, True):
                found = measure(model_dir, batch, algorithm, dtype=dtype, routing_replay=replay)
                print(
                    f"| {dtype} | {'of the engine' if replay else 'its own'} | {found.mismatch_mean:.5f} | "
                    f"{found.mismatch_max:.4f} | {found.behaviour_kl_k3:.2e} | {found.importance_ess:.5f} |"
                )


if __name__ == "__main__":
    main()
