"""Reads adapters in PEFT's format, and checks whether training can start from an adapter."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from protocol.errors import SettingsError
from protocol.host.json_file import read_object
from protocol.weights.lora import AdapterTarget, LoraConfig, adapter_shapes

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
SUPPORTED_VALUES: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "fan_in_fan_out": False,
    "use_dora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
}
"""Field of adapter_config.json -> its only supported value, which is also the value of a missing field."""
MATCHING_SETTINGS = {"r": "rank", "lora_alpha": "alpha", "use_rslora": "use_rslora"}
"""Field of adapter_config.json -> setting of [lora] that must have the same value."""


def check_peft(targets: Sequence[AdapterTarget], config: LoraConfig) -> None:
    """Check that `config.path` contains an adapter with the settings of `config` for exactly these weights.

    An empty `config.path` passes.

    Raises:
        SettingsError: the adapter is missing or differs; the message names the field or tensor.
    """
    if not config.path:
        return
    directory = Path(config.path)
    what = f"setting lora.path: {directory}"
    found = _read_config(directory / CONFIG, what)
    for field, name in MATCHING_SETTINGS.items():
        value, own = found.get(field, False), getattr(config, name)
        if value != own:
            raise SettingsError(f"{what}: {field} is {value!r}; set lora.{name} to it, which is {own!r}")
    shapes, wanted = _read_shapes(directory / TENSORS, what), adapter_shapes(list(targets), config.rank)
    if missing := sorted(wanted.keys() - shapes.keys()):
        names = json.dumps(target_modules(shapes))
        raise SettingsError(f"{what} has no tensor {missing[0]}; set lora.target_modules to {names}")
    if more := sorted(shapes.keys() - wanted.keys()):
        raise SettingsError(f"{what}: {more[0]} belongs to no weight that lora.target_modules names")
    _compare(wanted, shapes, what)


def read_peft(
    directory: Path, shapes: Mapping[str, tuple[int, ...]], what: str
) -> tuple[LoraConfig, list[AdapterTarget]]:
    """Return the settings of the adapter in a directory, and the weights that it adapts.

    Args:
        shapes: Hugging Face name -> shape, for every tensor of the model.
        what: name of the adapter in error messages.

    Raises:
        SettingsError: the adapter cannot be read, or does not fit the model.
    """
    found, tensors = _read_config(directory / CONFIG, what), _read_shapes(directory / TENSORS, what)
    rank, alpha = found.get("r"), found.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or rank < 1 or alpha <= 0:
        raise SettingsError(f"{what}: r is {rank!r} and lora_alpha {alpha!r}; both must be above 0")
    config = LoraConfig(
        rank, float(alpha), tuple(target_modules(tensors)), bool(found.get("use_rslora")), str(directory)
    )
    targets = [
        AdapterTarget(name, (shape[0], shape[1]))
        for name, shape in shapes.items()
        if len(shape) == 2 and AdapterTarget(name, (0, 0)).a in tensors
    ]
    wanted = adapter_shapes(targets, rank)
    if more := sorted(tensors.keys() - wanted.keys()):
        raise SettingsError(f"{what}: {more[0]} belongs to no weight that the model has")
    _compare(wanted, tensors, what)
    return config, targets


def _compare(wanted: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]], what: str) -> None:
    """Raise SettingsError if a tensor has a wrong shape."""
    for name, shape in wanted.items():
        if shapes.get(name) != shape:
            raise SettingsError(f"{what}: {name} has the shape {shapes.get(name)}, the model's needs {shape}")


def target_modules(names: Iterable[str]) -> list[str]:
    """Return the last components of the layer names in adapter tensor names."""
    return sorted({name.rpartition(".lora_")[0].rpartition(".")[2] for name in names})


def _read_config(path: Path, what: str) -> dict[str, Any]:
    found = read_object(path, f"{what}: {CONFIG}")
    for field, plain in SUPPORTED_VALUES.items():
        if (value := found.get(field, plain)) != plain and value:
            raise SettingsError(f"{what}: {field} is {value!r}; only {plain!r} is supported")
    return found


def _read_shapes(path: Path, what: str) -> dict[str, tuple[int, ...]]:
    from safetensors import SafetensorError, safe_open  # services without tensors import this module

    try:
        with safe_open(str(path), framework="numpy") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise SettingsError(f"{what}: {TENSORS}: {error}") from None
