"""Defines the settings of models other than the policy, a section each.

No torch here: every process reads settings.
"""

from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Interval

from protocol.paths import HubPath
from trainer.config import OptimizerConfig


@dataclass(frozen=True, slots=True)
class FrozenConfig:
    """A model that gives log-probabilities of the policy's samples and is never trained."""

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


FROZEN_ROLES = ("reference", "teacher")
"""Sections with a `FrozenConfig`."""


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
