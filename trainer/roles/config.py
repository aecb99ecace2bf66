"""Defines the settings of models other than the policy, a section each.

No torch here: every process reads settings.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Interval

from protocol.paths import HubPath
from trainer.config import OptimizerConfig, ParallelConfig


@dataclass(frozen=True, slots=True)
class FrozenConfig:
    """A model that judges the policy's samples, by log-probabilities or a score, and is never trained."""

    path: HubPath = ""
    """Model directory, or the name of a model on the Hugging Face hub. Its tokenizer has to be the policy's;
    size and family may be others."""
    revision: str = ""
    """Branch, tag or commit of a model on the hub. Empty: main. The commit of the first start is recorded and
    kept."""
    offload: bool = False
    """Whether it is in host memory between its passes: slower, and its memory on the device is free during
    the step."""


@dataclass(frozen=True, slots=True)
class ReferenceConfig(FrozenConfig):
    """Section `[reference]`: the model that `algorithm.kl_coef` keeps the policy near to.

    Without a path it is the initial policy: a copy of it or, under `[lora]`, the base that it has anyway.
    """


@dataclass(frozen=True, slots=True)
class TeacherConfig(FrozenConfig):
    """Section `[teacher]`: the model that `algorithm.name = "on_policy_distillation"` learns from."""


@dataclass(frozen=True, slots=True)
class RewardModelConfig(FrozenConfig):
    """Section `[reward_model]`: a classifier in the trainer's ranks, whose scores are added to rewards.

    A sequence classifier of one label, which reads the policy's tokens: prompt and answer.
    """

    weight: Annotated[float, Interval(ge=-1e6, le=1e6)] = 1.0
    """Factor of its score in the sum of a sample's rewards."""


REWARD_MODEL = "reward_model"
FROZEN_ROLES = ("reference", "teacher", REWARD_MODEL)
"""Sections with a `FrozenConfig`."""
Ranks = Annotated[int, Interval(ge=0, le=4096)]
TensorRanks = Annotated[int, Interval(ge=1, le=4096)]


@dataclass(frozen=True, slots=True)
class PlacementConfig:
    """Section `[placement]`: models beside the policy that have ranks of the trainer, and GPUs, of their own.

    They are in addition to the ranks of `[parallel]`.
    """

    reference: Ranks = 0
    """Ranks that have the reference model alone. 0: it is on the policy's ranks, in their layout."""
    reference_tensor_parallel_size: TensorRanks = 1
    """How many of them share every layer; the others have copies of the model, each with its part of the
    batch."""
    teacher: Ranks = 0
    """Ranks that have the teacher alone. 0: it is on the policy's ranks, in their layout."""
    teacher_tensor_parallel_size: TensorRanks = 1
    """As `reference_tensor_parallel_size`."""
    reward_model: Ranks = 0
    """Ranks that have the reward model alone. 0: it is on the policy's ranks, in their layout."""
    reward_model_tensor_parallel_size: TensorRanks = 1
    """As `reference_tensor_parallel_size`."""
    critic: Ranks = 0
    """Ranks that have the critic alone, which makes its updates while the policy makes its own. 0: it is on
    the policy's ranks, in their layout."""
    critic_tensor_parallel_size: TensorRanks = 1
    """As `reference_tensor_parallel_size`."""

    @property
    def ranks(self) -> Mapping[str, int]:
        """Roles with ranks of their own -> how many, in the order in which they follow the policy's."""
        return {role: count for role in PLACED_ROLES if (count := getattr(self, role))}

    @property
    def total(self) -> int:
        """Ranks of all these roles."""
        return sum(self.ranks.values())

    def layout(self, role: str) -> ParallelConfig:
        """Return the layout of a role's own ranks, which their tensor ranks divide."""
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
    """Directory of the model that it starts from, or its name on the Hugging Face hub, with the same tokens
    as the policy's: a causal language model, or a sequence or token classifier of one label, whose head it
    takes over. Empty: the policy's initial model. A head that is not there begins as zero."""
    revision: str = ""
    """Branch, tag or commit of a model on the hub. Empty: main. The commit of the first start is recorded and
    kept."""
    lr: Annotated[float, Interval(ge=0, le=1e3)] = 1e-5
    """Learning rate after the warm-up."""
    lr_warmup_steps: Annotated[int, Interval(ge=0, le=10**9)] = 0
    """Steps in which the learning rate rises linearly from 0. Skipped steps do not count. 0 is off."""
    critic_warmup_steps: Annotated[int, Interval(ge=0, le=10**9)] = 0
    """First steps of the run in which only the critic is trained: the policy's versions are all alike."""
    weight_decay: Annotated[float, Interval(ge=0, le=1e3)] = 0.0
    """Decoupled weight decay."""
    clip_grad: Annotated[float, Interval(ge=0, le=1e9)] = 1.0
    """Largest L2 norm of the critic's gradient. 0 is off."""
    value_clip: Annotated[float, Interval(ge=0, le=1e9)] = 0.2
    """By how much a batch may move a value before it has no gradient any more. 0 is off."""

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
