"""Tests that GRPO with the reference backend learns the largest of three digits, at lag 0 and 1."""

from pathlib import Path

import pytest
import torch

from protocol.messages import ScoredRollout
from tests.changes import slow_unless_changed
from tests.trainer.groups import GroupSpec, SampleSpec, scored, whole
from trainer.algorithms import AlgorithmConfig, make_algorithm
from trainer.config import OptimizerConfig, TrainerConfig
from trainer.functional.logprobs import token_logprobs
from trainer.reference.backend import ReferenceBackend
from trainer.step.plan import plan_step

DIGIT, EQUALS = 2, 12
"""Tokens of "0" and "="."""
PROMPTS, SAMPLES, STEPS = 32, 8, 32
ALGORITHM = make_algorithm(AlgorithmConfig())


@torch.no_grad()
def rollouts(model: torch.nn.Module, version: int, generator: torch.Generator) -> list[ScoredRollout]:
    """One token for each sample, drawn from the model itself."""
    digits = torch.randint(10, (PROMPTS, 3), generator=generator)
    prompts = torch.cat([digits + DIGIT, torch.full((PROMPTS, 1), EQUALS)], dim=1)
    logits = model(input_ids=prompts).logits
    tokens = torch.multinomial(logits[:, -1].softmax(-1), SAMPLES, replacement=True, generator=generator)
    groups = []
    for i, prompt in enumerate(prompts.tolist()):
        logprobs, _ = token_logprobs(logits[i, -1].expand(SAMPLES, -1), tokens[i])
        best = int(digits[i].max()) + DIGIT
        samples = [
            SampleSpec([token], [version], reward=float(token == best), logprobs=[logprob])
            for token, logprob in zip(tokens[i].tolist(), logprobs.tolist(), strict=True)
        ]
        groups.append(scored(GroupSpec(group=version * PROMPTS + i, prompt=prompt, samples=samples)))
    return groups


@slow_unless_changed(
    "trainer/reference/", "trainer/algorithms/", "trainer/functional/", "trainer/step/", "trainer/data/",
    "trainer/optimizers/",
)  # fmt: skip
@pytest.mark.parametrize("lag", [0, 1])
def test_grpo_learns_the_largest_digit(lag: int, model_dir: Path) -> None:
    backend = ReferenceBackend(
        model_dir,
        optimizer=OptimizerConfig(lr=1.5e-3, adam_beta2=0.999),
        trainer=TrainerConfig(backend="reference", micro_batch_size=256),
        algorithm=ALGORITHM,
    )
    generator = torch.Generator().manual_seed(0)
    rewards: list[float] = []
    waiting: list[list[ScoredRollout]] = []
    for version in range(STEPS + lag):
        waiting.append(rollouts(backend.model, max(version - lag, 0), generator))
        if len(waiting) <= lag:
            continue
        groups = [(group, lag) for group in waiting.pop(0)]
        plan = plan_step(groups, step=version - lag, algorithm=ALGORITHM, mask_late=False)
        stats = backend.train_step(whole(plan))
        assert stats.skipped == ""
        error = stats.logprob_error_max  # of tokens of lag 0
        assert error < 1e-4 if error is not None else lag > 0
        rewards.append(plan.stats.reward_mean)
    assert rewards[0] < 0.3
    assert sum(rewards[-3:]) / 3 > 0.7
