"""The settings of models that are not trained, a section each. No torch: every process reads settings."""

from dataclasses import dataclass

from protocol.paths import HubPath


@dataclass(frozen=True, slots=True)
class FrozenConfig:
    """A model that gives log-probabilities of the policy's samples and is never trained."""

    path: HubPath = ""
    """Model directory, or the name of a model on the Hugging Face hub. Its tokenizer has to be that of the
    policy; size and family may be others."""
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
