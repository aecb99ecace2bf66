"""Names LoRA adapters and selects the weights that get one (Hu et al. 2021, arXiv 2106.09685).

    W x + scaling B A x        A [rank, in], B [out, rank]

Tensor names follow PEFT. Published are A and scaling B, so that an engine adds B A without having to know the
scaling.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Interval

from protocol.errors import SettingsError
from protocol.paths import FilePath, set_first

PREFIX = "base_model.model."
WEIGHT = ".weight"
ALL_LINEAR = "all-linear"
LINEAR = (
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
"""Linear layers that trainer and engines have adapters for, by the last component of their names."""


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Section `[lora]`, with names as in PEFT.

    With a rank above 0, only adapters are trained and published; the model's own weights are frozen.
    """

    rank: Annotated[int, Interval(ge=0, le=10**5)] = set_first(0)
    """Rank of A and B; 0: off, all parameters are trained."""
    alpha: Annotated[float, Interval(gt=0, le=1e6)] = 16.0
    """Numerator of the scaling alpha / rank."""
    target_modules: tuple[str, ...] | str = ALL_LINEAR
    """Last components of the names of the linear layers that get an adapter, or "all-linear": each one of
    the model that trainer and engines have adapters for, which leaves out experts and fused layers."""
    use_rslora: bool = False
    """Whether the scaling is alpha / sqrt(rank) (Kalajdzievski 2023, arXiv 2312.03732)."""
    path: FilePath = ""
    """Directory in PEFT's format with the adapter that training starts from. Empty: A is random, B is
    zero."""
    dropout: Annotated[float, Interval(ge=0, lt=1)] = 0.0
    """Share of the elements of each adapter's input that a training pass sets to 0, scaling up the others, as
    PEFT does. Passes that compute log-probabilities alone have none, and mismatch is not measured."""

    def __post_init__(self) -> None:
        """Refuse text that is not "all-linear".

        Raises:
            SettingsError: it is another.
        """
        if isinstance(self.target_modules, str) and self.target_modules != ALL_LINEAR:
            raise SettingsError(
                f"setting lora.target_modules: {self.target_modules!r} is not known; use {ALL_LINEAR!r}, or "
                "an array of names"
            )

    @property
    def scaling(self) -> float:
        """The factor of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


NO_ADAPTERS = LoraConfig()


def as_scaled(config: LoraConfig) -> LoraConfig:
    """Return the config of published adapters, whose scaling is in B: as `config`, with a scaling of 1."""
    return replace(config, alpha=float(config.rank), use_rslora=False, path="")


@dataclass(frozen=True, slots=True)
class AdapterTarget:
    """A weight that has an adapter."""

    weight: str
    """Hugging Face name."""
    shape: tuple[int, int]
    """(out, in)."""

    @property
    def module(self) -> str:
        """Name of the layer to which the weight belongs."""
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
        shapes: Hugging Face name -> shape, of every tensor of the model.
        config: the section `[lora]`.

    Raises:
        SettingsError: a target module is not a linear layer of the model, or rank or alpha is not positive.
    """
    if config.rank < 1 or config.alpha <= 0:
        raise SettingsError(f"setting lora: rank {config.rank} and alpha {config.alpha:g} must be above 0")
    asked = config.target_modules
    found = [
        AdapterTarget(name, (shape[0], shape[1]))
        for name, shape in shapes.items()
        if name.endswith(WEIGHT) and len(shape) == 2 and _is_asked(name.removesuffix(WEIGHT), asked)
    ]
    names = LINEAR if isinstance(asked, str) else sorted(set(asked) - {target.last for target in found})
    if not found or (names and not isinstance(asked, str)):
        raise SettingsError(
            f"setting lora.target_modules: the model has no linear layer {', '.join(names) or 'of no name'}"
            f"{' outside experts; name its layers' if isinstance(asked, str) else ''}"
        )
    return found


def _is_asked(module: str, asked: tuple[str, ...] | str) -> bool:
    *path, last = module.split(".")
    if isinstance(asked, str):
        return last in LINEAR and not any("expert" in part for part in path)
    return last in asked


def adapter_shapes(targets: list[AdapterTarget], rank: int) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors of an adapter."""
    shapes: dict[str, tuple[int, ...]] = {}
    for target in targets:
        shapes |= {target.a: (rank, target.shape[1]), target.b: (target.shape[0], rank)}
    return shapes
