"""With E = 0 a run is TRL's GRPOTrainer on the same samples: losses and weights after each step, but for
rounding."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from protocol.codec import decode_payload
from protocol.messages import ScoredRollout
from protocol.rollout_view import decode_rollout
from services.settings.sections import Settings
from services.tools.recorded.run import RecordedRun
from tests.integration import synchronous
from tests.integration.loop import ROOT, run_to_end, settings_for
from tests.integration.synchronous import GROUPS, LENGTH, LR, SAMPLES

STEPS = 5
OVERRIDES = (
    f"run.steps={STEPS}",
    f'run.modules=["{ROOT}"]',
    "bound.max_staleness=0",
    f"bound.groups_per_step={GROUPS}",
    f"sampling.samples_per_prompt={SAMPLES}",
    f"sampling.max_tokens={LENGTH}",
    "engine.name=hf",
    f'reward.verifiers=[{{name="function", options={{path="{synchronous.__name__}:score"}}}}]',
    "trainer.checkpoint_every=1",
    f"trainer.keep_checkpoints={STEPS + 1}",
    "algorithm.name=dr_grpo",
    f"algorithm.length_normalizer={LENGTH}",
    f"optimizer.lr={LR}",
    "optimizer.adam_beta2=0.95",
    "eval.at_end=false",
)
Samples = dict[str, list[Any]]
"""What TRL calls a rollout: field -> values of all samples of a step."""


def samples_of(recorded: RecordedRun, step: int) -> Samples:
    """Return the recorded samples of a step."""
    found: Samples = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "recorded": []}
    for record in recorded.command(step).records:
        group = decode_payload(record)
        assert isinstance(group, ScoredRollout)
        view = decode_rollout(group.rollout)
        for row, reward in zip(view.rows, group.rewards.numpy().tolist(), strict=True):
            found["prompt_ids"].append(view.prompt.tolist())
            found["completion_ids"].append(row.tokens.tolist())
            found["logprobs"].append(row.logprobs.tolist())
            found["recorded"].append(reward)
    return found


def trained_by_trl(
    settings: Settings, steps: list[Samples], directory: Path
) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """Train the samples with TRL; returns loss and weights after each step."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    model = AutoModelForCausalLM.from_pretrained(settings.model_dir, dtype=torch.float32)
    model.get_input_embeddings().padding_idx = None  # its row is trained like the others
    weights, losses, next_step = [], list[float](), itertools.count()

    class Kept(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            weights.append({name: value.detach().clone() for name, value in model.named_parameters()})

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
            losses.extend([logs["loss"]] if "loss" in logs else [])

    config = GRPOConfig(
        output_dir=str(directory),
        max_steps=STEPS,
        per_device_train_batch_size=GROUPS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=LENGTH,
        loss_type="dr_grpo",
        scale_rewards="none",
        beta=0.0,
        learning_rate=LR,
        adam_beta2=0.95,
        weight_decay=settings.optimizer.weight_decay,
        max_grad_norm=settings.optimizer.clip_grad,
        lr_scheduler_type="constant",
        disable_dropout=True,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda recorded, **given: recorded,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["1="] * GROUPS * STEPS}),
        processing_class=PreTrainedTokenizerFast.from_pretrained(settings.model_dir),
        callbacks=[Kept()],
        rollout_func=lambda prompts, trainer: steps[next(next_step)],
    )
    trainer.train()
    return list(zip(losses, weights, strict=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["megatron", "reference"])
def test_a_run_with_bound_0_is_trl_on_the_same_samples(tmp_path: Path, backend: str) -> None:
    settings = settings_for(tmp_path / "run", "demo.toml", *OVERRIDES, f"trainer.backend={backend}")
    run = asyncio.run(run_to_end(settings))
    recorded = RecordedRun(settings, range(STEPS))
    steps = [samples_of(recorded, step) for step in range(STEPS)]
    assert sum(len(set(one["recorded"])) > 1 for one in steps) == STEPS
    start = load_file(settings.model_dir / "model.safetensors")
    theirs = trained_by_trl(settings, steps, tmp_path / "trl")
    for step, (loss, weights) in enumerate(theirs):
        ours = load_file(settings.run_dir / "exports" / f"step_{step + 1:08}" / "model.safetensors")
        assert run.steps[step]["loss"] == pytest.approx(loss, abs=1e-6), step
        for name, tensor in ours.items():
            moved = (tensor - start[name]).norm()
            assert (tensor - weights[name]).norm() < 0.003 * moved, (step, name)
