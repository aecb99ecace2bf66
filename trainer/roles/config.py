"""Defines the settings of models other than the policy, one class per section.

Does not import torch: every process reads settings.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Interval

from protocol.paths import HubPath
from trainer.config import OptimizerConfig, ParallelConfig


@dataclass(frozen=True, slots=True)
class FrozenConfig:
    """A frozen model that judges the policy's samples, by log-probabilities or a score."""

    path: HubPath = ""
    """Model directory, or the name of a model on the Hugging Face hub. Its tokenizer must be the policy's;
    size and family may differ."""
    revision: str = ""
    """Branch, tag or commit of a model on the hub. Empty: main. The run keeps the commit of its first start.
    """
    offload: bool = False
    """Whether the model is in host memory between its passes: slower, but frees device memory during the
    step."""


@dataclass(frozen=True, slots=True)
class ReferenceConfig(FrozenConfig):
    """Section `[reference]`: reference model of the KL penalty `algorithm.kl_coef`.

    Without a path, the reference is the initial policy: a copy or, under `[lora]`, the frozen base.
    """


@dataclass(frozen=True, slots=True)
class TeacherConfig(FrozenConfig):
    """Section `[teacher]`: teacher of `algorithm.name = "on_policy_distillation"`."""


@dataclass(frozen=True, slots=True)
class RewardModelConfig(FrozenConfig):
    """Section `[reward_model]`: a classifier on the trainer's ranks, whose scores are added to rewards.

    A sequence classifier with one label, which reads the policy's tokens: prompt and answer.
    """

    weight: Annotated[float, Interval(ge=-1e6, le=1e6)] = 1.0
    """Weight of the score in a sample's reward."""


REWARD_MODEL = "reward_model"
FROZEN_ROLES = ("reference", "teacher", REWARD_MODEL)
"""Sections with a `FrozenConfig`."""
Ranks = Annotated[int, Interval(ge=0, le=4096)]
TensorRanks = Annotated[int, Interval(ge=1, le=4096)]


@dataclass(frozen=True, slots=True)
class PlacementConfig:
    """Section `[placement]`: models with ranks of the trainer, and GPUs, of their own.

    These ranks are in addition to the ranks of `[parallel]`.
    """

    reference: Ranks = 0
    """Ranks of the reference model. 0: on the policy's ranks, in their layout."""
    reference_tensor_parallel_size: TensorRanks = 1
    """Tensor-parallel size of these ranks; they have (ranks / this size) replicas, each with a part of the
    batch."""
    teacher: Ranks = 0
    """Ranks of the teacher. 0: on the policy's ranks, in their layout."""
    teacher_tensor_parallel_size: TensorRanks = 1
    """As `reference_tensor_parallel_size`."""
    reward_model: Ranks = 0
    """Ranks of the reward model. 0: on the policy's ranks, in their layout."""
    reward_model_tensor_parallel_size: TensorRanks = 1
    """As `reference_tensor_parallel_size`."""
    critic: Ranks = 0
    """Ranks of the critic, which is updated at the same time as the policy. 0: on the policy's ranks, in
    their layout."""
    critic_tensor_parallel_size: TensorRanks = 1
    """As `reference_tensor_parallel_size`."""

    @property
    def ranks(self) -> Mapping[str, int]:
        """Role with ranks of its own -> number of ranks, in rank order after the policy's."""
        return {role: count for role in PLACED_ROLES if (count := getattr(self, role))}

    @property
    def total(self) -> int:
        """Number of ranks of all these roles."""
        return sum(self.ranks.values())

    def layout(self, role: str) -> ParallelConfig:
        """Return the layout of a role's own ranks."""
        tensor = getattr(self, f"{role}_tensor_parallel_size")
        return ParallelConfig(
            tensor_model_parallel_size=tensor, data_parallel_size=getattr(self, role) // tensor
        )


PLACED_ROLES = (*FROZEN_ROLES, "critic")
"""Roles that `[placement]` can give ranks of their own."""


@dataclass(frozen=True, slots=True)
class CriticConfig:
    """Section `[critic]`: the model of `algorithm.name` = ppo that estimates the value of a state.

    AdamW's other settings are as in `[optimizer]`.
    """

    path: HubPath = ""
    """Initial model: a directory, or a name on the Hugging Face hub, with the policy's tokens. Either a
    causal language model, or a sequence or token classifier with one label, whose head is reused. Empty: the
    policy's initial model. A missing head starts at zero."""
    revision: str = ""
    """Branch, tag or commit of a model on the hub. Empty: main. The run keeps the commit of its first start.
    """
    lr: Annotated[float, Interval(ge=0, le=1e3)] = 1e-5
    """Learning rate after the warm-up."""
    lr_warmup_steps: Annotated[int, Interval(ge=0, le=10**9)] = 0
    """Steps in which the learning rate rises linearly from 0. Skipped steps do not count. 0 is off."""
    critic_warmup_steps: Annotated[int, Interval(ge=0, le=10**9)] = 0
    """First steps of the run, in which only the critic is trained and the policy's weights are unchanged."""
    weight_decay: Annotated[float, Interval(ge=0, le=1e3)] = 0.0
    """Decoupled weight decay."""
    clip_grad: Annotated[float, Interval(ge=0, le=1e9)] = 1.0
    """Maximum L2 norm of the critic's gradient. 0 is off."""
    value_clip: Annotated[float, Interval(ge=0, le=1e9)] = 0.2
    """Maximum change of a value per batch; beyond, its gradient is zero. 0 is off."""

    def optimizer(self, policy: OptimizerConfig) -> OptimizerConfig:
        """Return the settings of the critic's optimizer, given the policy's."""
        return replace(
            policy,
            lr=self.lr,
            lr_warmup_steps=self.lr_warmup_steps,
            lr_decay_style="constant",
            weight_decay=self.weight_decay,
            clip_grad=self.clip_grad,
        )
