"""Lists the recipes that are recomputed, and makes the records of their steps."""

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from protocol.codec import encode_payload
from protocol.messages import ScoredRollout
from tests.trainer.classifiers import save_classifier
from tests.trainer.groups import GroupSpec, SampleSpec, scored
from tests.trainer.megatron.models import save_model
from tests.trainer.recomputed.loop import NaiveTrainer
from tests.trainer.recomputed.records import Groups
from trainer.algorithms import Algorithm, make_algorithm
from trainer.algorithms.registry import ALGORITHMS, DISTILLATION
from trainer.config import AlgorithmConfig, OptimizerConfig
from trainer.roles.config import REWARD_MODEL, CriticConfig
from trainer.step.train_command import TrainCommand

MODEL, OTHER = "qwen2", "qwen3-tied"
"""The policy, and a frozen model beside it: of one vocabulary, of two families."""
REWARD_WEIGHT = 0.7
TEMPERATURE = 0.9
BOUND = 2
FIRST = 3
"""Version that the first step starts from, so that tokens of lag 3 exist."""
STEPS = 4
WITHOUT_TOKENS = 1
"""The step all of whose tokens are over the bound: it changes nothing."""
OPTIMIZER = OptimizerConfig(lr=1e-3, lr_warmup_steps=2, weight_decay=0.1, adam_eps=1e-4, clip_grad=0.5)
"""With an `adam_eps` above the rounding of float32 gradients: a smaller one makes steps of noise."""
CRITIC = CriticConfig(lr=1e-3, lr_warmup_steps=2, weight_decay=0.05, clip_grad=2.0, value_clip=0.02)


@dataclass(frozen=True)
class Case:
    """One recipe with its correction."""

    algorithm: dict[str, Any] = field(default_factory=dict)
    decoupled: bool = False
    reference: bool = False
    """Whether the reference is another model than the initial policy."""
    epochs: int = 1
    """Updates of a step, each on the whole batch."""
    branched: bool = False
    """Whether samples have branches."""
    scored: bool = False
    """Whether the trainer has a reward model."""

    @property
    def has_critic(self) -> bool:
        return ALGORITHMS[self.config.name].has_critic

    @property
    def frozen(self) -> tuple[str, ...]:
        """Roles of the other model."""
        teacher = ("teacher",) * (self.config.name == DISTILLATION)
        return ("reference",) * self.reference + teacher + (REWARD_MODEL,) * self.scored

    @property
    def config(self) -> AlgorithmConfig:
        return AlgorithmConfig(**{"advantage_eps": 0.01, "importance_cap": 0.0, **self.algorithm})

    def made(self) -> Algorithm:
        return make_algorithm(self.config)

    def command(self, step: int, groups: Groups) -> TrainCommand:
        """The step on these groups that starts from version `step`."""
        return TrainCommand(
            step=step,
            records=[encode_payload(scored) for scored, _ in groups],
            bounds=[bound for _, bound in groups],
            mask_late=True,
            temperature=TEMPERATURE,
            recompute_logprobs=self.decoupled,
            reference_logprobs=self.config.kl_coef > 0,
            epochs=self.epochs,
        )


GAE = {"name": "ppo", "gamma": 0.97, "gae_lambda": 0.9}
NARROW = {"rejection_low": 0.8, "rejection_high": 1.3}
CASES = {
    "grpo": Case({"name": "grpo"}),
    "dr_grpo": Case({"name": "dr_grpo", "length_normalizer": 6}),
    "dr_grpo-longest": Case({"name": "dr_grpo"}),
    "dapo": Case({"name": "dapo", "clip_high": 0.28}),
    "gspo": Case({"name": "gspo", "clip_low": 0.05, "clip_high": 0.05}),
    "cispo": Case({"name": "cispo", "clip_low": 0.9}),
    "rloo": Case({"name": "rloo"}),
    "reinforce_plus_plus": Case({"name": "reinforce_plus_plus"}),
    "reinforce_plus_plus_baseline": Case({"name": "reinforce_plus_plus_baseline"}),
    "ppo": Case({**GAE, "entropy_coef": 0.01}),
    "ppo-two-updates": Case(GAE, epochs=2),
    "ppo-kl-in-reward": Case(
        {
            **GAE,
            "kl_coef": 0.1,
            "use_kl_in_reward": True,
            "whiten_advantages": False,
            "truncated": "mask",
        },
        reference=True,
    ),
    "on_policy_distillation": Case({"name": "on_policy_distillation", "opd_kl_coef": 0.7}),
    "on_policy_distillation-rewards": Case(
        {"name": "on_policy_distillation", "opd_reward_coef": 0.4, "importance_cap": 1.1}, decoupled=True
    ),
    "sft": Case({"name": "sft"}),
    "kl-in-reward": Case({"name": "rloo", "kl_coef": 0.05, "use_kl_in_reward": True}),
    "kl-in-reward-path": Case(
        {"name": "reinforce_plus_plus", "kl_coef": 0.05, "use_kl_in_reward": True}, reference=True
    ),
    "kl-path": Case({"name": "grpo", "kl_coef": 0.1}, reference=True),
    "overlong-mask": Case({"name": "grpo", "truncated": "mask"}),
    "overlong-shape": Case(
        {
            "name": "dapo",
            "truncated": "shape",
            "overlong_length": 5,
            "overlong_buffer": 3,
            "overlong_penalty": 0.5,
        }
    ),
    "decoupled": Case({"name": "grpo", "importance_cap": 1e6}, decoupled=True),
    "truncated": Case({"name": "grpo", "importance_cap": 1.1}, decoupled=True),
    "truncated-sequence": Case(
        {"name": "dapo", "importance_cap": 1.2, "importance_level": "sequence"}, decoupled=True
    ),
    "rejection-token": Case({"name": "grpo", "rejection_level": "token", **NARROW}),
    "rejection-sequence": Case(
        {
            "name": "rloo",
            "importance_cap": 1.3,
            "importance_level": "sequence",
            "rejection_level": "sequence",
            **NARROW,
        },
        decoupled=True,
    ),
    "rejection-geometric": Case(
        {"name": "gspo", "importance_cap": 1.3, "rejection_level": "geometric", **NARROW}, decoupled=True
    ),
    "m2po": Case(
        {"name": "m2po", "second_moment_threshold": 0.04, "clip_low": 0.05, "clip_high": 0.05}, epochs=2
    ),
    "m2po-least-clip": Case({"name": "m2po", "second_moment_threshold": 1e-4}),
    "interpolated": Case(
        {"name": "grpo", "proximal_policy": "interpolated", "importance_cap": 1.1}, decoupled=True
    ),
    "ess": Case({"name": "dapo", "ess_scaling": "sqrt"}),
    "kl-k1-entropy": Case({"name": "grpo", "kl_coef": 0.1, "kl_estimator": "k1", "entropy_coef": 0.02}),
    "kl-k2": Case({"name": "dr_grpo", "kl_coef": 0.1, "kl_estimator": "k2"}),
    "kl-k3": Case(
        {"name": "cispo", "kl_coef": 0.1, "kl_estimator": "k3", "importance_cap": 1.1}, decoupled=True
    ),
    "branches": Case(
        {"name": "grpo", "truncated": "mask", "importance_cap": 1.1}, decoupled=True, branched=True
    ),
    "branches-gspo": Case({"name": "gspo", "clip_low": 0.05, "clip_high": 0.05}, branched=True),
    "branches-dr_grpo": Case({"name": "dr_grpo"}, branched=True),
    "branches-sequence": Case(
        {
            "name": "dapo",
            "importance_cap": 1.2,
            "importance_level": "sequence",
            "ess_scaling": "sqrt",
            "truncated": "shape",
            "overlong_length": 9,
            "overlong_buffer": 5,
            "overlong_penalty": 0.5,
        },
        decoupled=True,
        branched=True,
    ),
    "branches-kl-in-reward": Case(
        {"name": "reinforce_plus_plus", "kl_coef": 0.05, "use_kl_in_reward": True}, branched=True
    ),
    "branches-baseline-kl-in-reward": Case(
        {"name": "reinforce_plus_plus_baseline", "kl_coef": 0.05, "use_kl_in_reward": True}, branched=True
    ),
    "reward-model": Case({"name": "grpo", "kl_coef": 0.05, "use_kl_in_reward": True}, scored=True),
    "reward-model-whitened": Case(
        {"name": "reinforce_plus_plus", "kl_coef": 0.05, "use_kl_in_reward": True}, scored=True
    ),
    "branches-reward-model": Case({"name": "rloo", "truncated": "mask"}, branched=True, scored=True),
    "reward-model-ppo": Case(GAE, branched=True, scored=True),
    "branches-ppo": Case({**GAE, "kl_coef": 0.1, "use_kl_in_reward": True}, reference=True, branched=True),
}


def model_dir(root: Path) -> Path:
    """The policy of all cases, saved once, beside the other model."""
    save_classifier(save_model(OTHER, root), root / REWARD_MODEL)
    return save_model(MODEL, root)


def other_model(directory: Path, role: str = "") -> Path:
    """The frozen model of a case with one."""
    return directory.parent / (REWARD_MODEL if role == REWARD_MODEL else OTHER)


@lru_cache(maxsize=2)
def records(directory: Path, branched: bool = False) -> tuple[Groups, ...]:
    """The groups of each step: lags 0 to 3 under a bound of 2, inserted tokens, a sample without a trained
    one, a truncated sample in every group, a group without signal, and a step without a token within the
    bound. If `branched`, samples have up to three rows, one of them without a trained token.

    The engine's log-probabilities are those of the initial model, with noise.
    """
    generator = torch.Generator().manual_seed(7)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return tuple(
        tuple((_group(model, step, number, generator, branched), BOUND) for number in range(3))
        for step in range(STEPS)
    )


BRANCHES = ((0,), (), (0, 1), (0,))
"""Place of a sample -> the parents of its further rows, by their places in the sample."""


def _group(
    model: torch.nn.Module, step: int, number: int, generator: torch.Generator, branched: bool
) -> ScoredRollout:
    """A group of a step; all rewards of group 1 are equal."""

    def draw(high: int, low: int = 0) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    prompt = [draw(131) for _ in range(2 + number)]
    rows: list[SampleSpec] = []
    branches: list[tuple[int, int, int]] = []
    full: list[list[int]] = []
    for place in range(4):
        first = len(rows)
        for parent in (-1, *(BRANCHES[place] if branched else ())):
            before = full[first + parent] if parent >= 0 else []
            shared = draw(len(before) + 1) if parent >= 0 else 0
            context = before[:shared]
            length = 1 if (number, place, parent) == (0, 3, -1) else draw(7, 2)
            tokens = [draw(131) for _ in range(length)]
            oldest = 3 if place == 2 else 2
            lags = sorted((draw(oldest + 1) for _ in range(length)), reverse=True)
            if (number, place) == (0, 3) or step == WITHOUT_TOKENS or (number, parent) == (2, 1):
                lags = [BOUND + 1] * length  # none is within the bound
            noise = 0.25 * torch.randn(length, generator=generator)
            rows.append(
                SampleSpec(
                    tokens,
                    [FIRST + step - lag for lag in lags],
                    reward=0.5 if number == 1 else draw(3) / 2 + 0.1 * place,
                    mask=[0 if place == 1 and token == 1 else 1 for token in range(length)],
                    logprobs=(_logprobs(model, prompt + context, tokens) + noise).tolist(),
                    finish="length" if place == 0 else "stop",
                )
            )
            branches.append((place, first + parent if parent >= 0 else -1, shared))
            full.append(context + tokens)
    spec = GroupSpec(
        group=10 * step + number, prompt=prompt, samples=rows, branches=branches if branched else ()
    )
    return scored(spec)


@torch.no_grad()
def _logprobs(model: torch.nn.Module, before: list[int], tokens: list[int]) -> torch.Tensor:
    """Return log-probabilities of tokens that follow others, under the sampling temperature."""
    logits = model(input_ids=torch.tensor([before + tokens])).logits[0] / TEMPERATURE
    return logits.log_softmax(-1)[torch.arange(len(before) - 1, len(before) + len(tokens) - 1), tokens]


@lru_cache(maxsize=len(CASES))
def recomputed(name: str, directory: Path) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """What each step of a case reports, and the weights after the last, by the naive loop."""
    case = CASES[name]
    paths: dict[str, Any] = {role: other_model(directory) for role in case.frozen if role != REWARD_MODEL}
    if case.scored:
        paths[REWARD_MODEL] = other_model(directory, REWARD_MODEL), REWARD_WEIGHT
    critic = CRITIC if case.has_critic else None
    trainer = NaiveTrainer(directory, case.config, OPTIMIZER, TEMPERATURE, **paths, critic=critic)
    reports = [
        trainer.step(groups, FIRST + step, decoupled=case.decoupled, epochs=case.epochs)
        for step, groups in enumerate(records(directory, case.branched))
    ]
    return reports, trainer.weights()
