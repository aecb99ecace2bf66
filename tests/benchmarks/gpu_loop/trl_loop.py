"""Runs the job with TRL's GRPOTrainer, vLLM in its process, and prints each step as a line of JSON.

    python -m tests.benchmarks.gpu_loop.trl_loop --model DIR --prompts FILE [--set section.key=value]
    [--option name=value]

The numbers of the job are read from the settings of ours. Needs trl, datasets and accelerate.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu_loop.job import JobFiles, read_prompts
from tests.benchmarks.gpu_loop.word_reward import score

STEP = "step "
"""Begins the lines with steps."""
TOGETHER = 16
"""Samples of a forward pass on a GPU: the most of a power of two that fits beside the engine on 80 GB."""
ONE_PROCESS = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29611",
    "WANDB_DISABLED": "true",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
"""Environment that vLLM in a trainer's process wants."""


def main() -> None:
    """Train; print as steps are made."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="directory that TRL may write to")
    parser.add_argument("--set", action="append", default=[], help="of the job: section.key=value")
    parser.add_argument("--option", action="append", default=[], help="of GRPOConfig: name=JSON")
    parser.add_argument("--no-vllm", action="store_true", help="generate with transformers: a rehearsal")
    options = parser.parse_args()
    for name, value in ONE_PROCESS.items():
        os.environ.setdefault(name, value)
    _train(options)


def _arguments(options: argparse.Namespace, job: Any) -> dict[str, Any]:
    """Return what GRPOConfig is given: the job, and otherwise what TRL chooses."""
    samples = job.bound.groups_per_step * job.sampling.samples_per_prompt
    together = min(TOGETHER, samples)
    on_gpu = job.trainer.dtype == "bfloat16"
    found = {
        "output_dir": str(options.out),
        "max_steps": job.run.steps,
        "per_device_train_batch_size": together,
        "gradient_accumulation_steps": samples // together,
        "num_generations": job.sampling.samples_per_prompt,
        "max_completion_length": job.sampling.max_tokens,
        "temperature": job.sampling.temperature,
        "learning_rate": job.optimizer.lr,
        "adam_beta2": job.optimizer.adam_beta2,
        "lr_scheduler_type": "constant",
        "beta": 0.0,
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
        "gradient_checkpointing": False,
        "disable_dropout": True,
        "model_init_kwargs": {"dtype": job.trainer.dtype},
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
    }
    if not options.no_vllm:
        found |= {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": job.engine.memory_fraction,
            "vllm_max_model_length": job.engine.max_model_len,
        }
    return found | {name: json.loads(text) for name, _, text in (o.partition("=") for o in options.option)}


def _train(options: argparse.Namespace) -> None:
    import torch
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    job = JobFiles(options.model, options.prompts).settings(tuple(options.set))
    samples = job.bound.groups_per_step * job.sampling.samples_per_prompt

    class Printer(TrainerCallback):
        """Prints a step when its length is logged, with the time of its end."""

        time = 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.time = time.time()

        def on_log(
            self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **given: Any
        ) -> None:
            if logs and "step_time" in logs:
                step = {"time": self.time, "trained_tokens": samples * logs["completions/mean_length"]}
                if torch.cuda.is_available():
                    step["memory_peak_gb"] = torch.cuda.max_memory_allocated() / 2**30
                print(STEP + json.dumps(step), flush=True)

    prompts = InMemoryTable.from_pydict({"prompt": read_prompts(options.prompts)})
    trainer = GRPOTrainer(
        model=str(options.model),
        reward_funcs=_score_all,
        args=GRPOConfig(**_arguments(options, job)),
        train_dataset=Dataset(prompts, fingerprint="words"),
        processing_class=PreTrainedTokenizerFast.from_pretrained(options.model),
        callbacks=[Printer()],
    )
    trainer.train()


def _score_all(completions: list[str], **given: Any) -> list[float]:
    return [score(response=text) for text in completions]


if __name__ == "__main__":  # vLLM starts processes that import this module
    main()
