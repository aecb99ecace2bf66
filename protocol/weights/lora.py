"""Names LoRA adapters and selects the adapted weights (Hu et al. 2021, arXiv 2106.09685).

    W x + scaling B A x        A [rank, in], B [out, rank]

Tensor names follow PEFT. A and scaling B are published, so engines add B A without knowing the scaling.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Interval

from protocol.errors import SettingsError
from protocol.paths import FilePath, basic_setting

PREFIX = "base_model.model."
WEIGHT = ".weight"
ALL_LINEAR = "all-linear"
LINEAR_LAYERS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "q_b_proj",
    "kv_b_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "c_fc",
    "c_proj",
    "dense",
    "fc1",
    "fc2",
)
"""Linear layers that trainer and engines can adapt, by the last component of their names."""


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Section `[lora]`, with names as in PEFT.

    With a rank above 0, only adapters are trained and published; the model's own weights are frozen.
    """

    rank: Annotated[int, Interval(ge=0, le=10**5)] = basic_setting(0)
    """Rank of A and B; 0: no adapters, all parameters are trained."""
    alpha: Annotated[float, Interval(gt=0, le=1e6)] = 16.0
    """Numerator of the scaling alpha / rank."""
    target_modules: tuple[str, ...] | str = ALL_LINEAR
    """Linear layers that get an adapter, by the last components of their names. "all-linear": every layer
    that trainer and engines can adapt, except experts and fused layers."""
    use_rslora: bool = False
    """Whether the scaling is alpha / sqrt(rank) (Kalajdzievski 2023, arXiv 2312.03732)."""
    path: FilePath = ""
    """Directory in PEFT's format with the initial adapter. Empty: A is random, B is zero."""
    dropout: Annotated[float, Interval(ge=0, lt=1)] = 0.0
    """Probability of zeroing each element of an adapter's input in a training pass; the other elements are
    scaled up, as in PEFT. Passes that only compute log-probabilities use no dropout. The mismatch is not
    measured."""

    def __post_init__(self) -> None:
        """Raise SettingsError if `target_modules` is a text other than "all-linear"."""
        if isinstance(self.target_modules, str) and self.target_modules != ALL_LINEAR:
            raise SettingsError(
                f"setting lora.target_modules: {self.target_modules!r} is not known; use {ALL_LINEAR!r}, or "
                "an array of names"
            )

    @property
    def scaling(self) -> float:
        """Factor of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


NO_ADAPTERS = LoraConfig()


def as_scaled(config: LoraConfig) -> LoraConfig:
    """Return the config of published adapters: `config` with scaling 1, since B includes the scaling."""
    return replace(config, alpha=float(config.rank), use_rslora=False, path="")


@dataclass(frozen=True, slots=True)
class AdapterTarget:
    """A weight with an adapter."""

    weight: str
    """Hugging Face name."""
    shape: tuple[int, int]
    """(out, in)."""

    @property
    def module(self) -> str:
        """Name of the layer that contains the weight."""
        return self.weight.removesuffix(WEIGHT)

    @property
    def last(self) -> str:
        """Last component of the layer's name."""
        return self.module.rpartition(".")[2]

    @property
    def a(self) -> str:
        """Name of the tensor A."""
        return f"{PREFIX}{self.module}.lora_A{WEIGHT}"

    @property
    def b(self) -> str:
        """Name of the tensor B."""
        return f"{PREFIX}{self.module}.lora_B{WEIGHT}"


def adapter_targets(shapes: Mapping[str, tuple[int, ...]], config: LoraConfig) -> list[AdapterTarget]:
    """Return the weights that get an adapter, in the order of `shapes`.

    Args:
        shapes: Hugging Face name -> shape, for every tensor of the model.

    Raises:
        SettingsError: a target module is not a linear layer of the model, or rank or alpha is not positive.
    """
    if config.rank < 1 or config.alpha <= 0:
        raise SettingsError(f"setting lora: rank {config.rank} and alpha {config.alpha:g} must be above 0")
    target_modules = config.target_modules
    found = [
        AdapterTarget(name, (shape[0], shape[1]))
        for name, shape in shapes.items()
        if name.endswith(WEIGHT) and len(shape) == 2 and _is_target(name.removesuffix(WEIGHT), target_modules)
    ]
    names = (
        LINEAR_LAYERS
        if isinstance(target_modules, str)
        else sorted(set(target_modules) - {target.last for target in found})
    )
    if not found or (names and not isinstance(target_modules, str)):
        missing = ", ".join(names) or "(target_modules is empty)"
        raise SettingsError(
            f"setting lora.target_modules: the model has no linear layer {missing}"
            f"{' outside experts; name its layers' if isinstance(target_modules, str) else ''}"
        )
    return found


def _is_target(module: str, target_modules: tuple[str, ...] | str) -> bool:
    *path, last = module.split(".")
    if isinstance(target_modules, str):
        return last in LINEAR_LAYERS and not any("expert" in part for part in path)
    return last in target_modules


def adapter_shapes(targets: list[AdapterTarget], rank: int) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors of an adapter."""
    shapes: dict[str, tuple[int, ...]] = {}
    for target in targets:
        shapes |= {target.a: (rank, target.shape[1]), target.b: (target.shape[0], rank)}
    return shapes
