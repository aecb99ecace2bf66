"""Names LoRA adapters and selects the weights that get one (Hu et al. 2021, arXiv 2106.09685).

    W x + (alpha / rank) B A x        A [rank, in], B [out, rank]

Tensor names follow PEFT. Published are A and (alpha / rank) B, so that an engine adds B A without having to
know the scaling.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from protocol.errors import SettingsError
from protocol.paths import set_first

PREFIX = "base_model.model."
WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Section `[lora]`, with names as in PEFT.

    With a rank above 0, only adapters are trained and published; the model's own weights are frozen.
    """

    rank: Annotated[int, Meta(ge=0, le=10**5)] = set_first(0)
    """Rank of A and B; 0: off, all parameters are trained."""
    alpha: Annotated[float, Meta(gt=0, le=1e6)] = 16.0
    """Numerator of the scaling alpha / rank."""
    target_modules: tuple[str, ...] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """Last components of the names of the linear layers that get an adapter."""

    @property
    def scaling(self) -> float:
        """The factor of B A."""
        return self.alpha / self.rank


NO_ADAPTERS = LoraConfig()


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
    found = [
        AdapterTarget(name, (shape[0], shape[1]))
        for name, shape in shapes.items()
        if name.endswith(WEIGHT)
        and len(shape) == 2
        and name.removesuffix(WEIGHT).rpartition(".")[2] in config.target_modules
    ]
    missing = sorted(set(config.target_modules) - {target.module.rpartition(".")[2] for target in found})
    if missing or not found:
        raise SettingsError(
            f"setting lora.target_modules: the model has no linear layer {', '.join(missing) or 'of no name'}"
        )
    return found


def adapter_shapes(targets: list[AdapterTarget], rank: int) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors of an adapter."""
    shapes: dict[str, tuple[int, ...]] = {}
    for target in targets:
        shapes |= {target.a: (rank, target.shape[1]), target.b: (target.shape[0], rank)}
    return shapes
