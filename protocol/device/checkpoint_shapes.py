"""Reads names and shapes of a checkpoint's tensors without loading them; imports torch only if needed."""

from collections.abc import Mapping
from math import prod
from pathlib import Path

from protocol.errors import EngineError, SettingsError


def tensor_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of all tensors in a directory's safetensors files, from the file headers.

    Raises:
        SettingsError: a file cannot be read; the message names the file.
    """
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(str(path), framework="numpy") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        except (OSError, SafetensorError) as error:
            raise SettingsError(f"{path}: {error}") from error
    return shapes


def count_parameters(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the number of elements in tensors of these shapes."""
    return sum(map(prod, shapes.values()))


def checkpoint_shapes(model_dir: Path) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of a model's checkpoint tensors.

    The shapes come from the headers of the safetensors files, or from the architecture if there are no files.

    Raises:
        EngineError: a file cannot be read, or the architecture is unknown.
    """
    try:
        shapes = tensor_shapes(model_dir)
    except SettingsError as error:
        raise EngineError(str(error)) from error
    return shapes or _architecture_shapes(model_dir)


def _architecture_shapes(model_dir: Path) -> dict[str, tuple[int, ...]]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from protocol.device.checkpoint_views import checkpoint_views, model_tensors
    from protocol.device.hf_models import MODEL_BUILDING, code_trust

    try:
        with MODEL_BUILDING, torch.device("meta"):
            config = AutoConfig.from_pretrained(model_dir, **code_trust())
            model = AutoModelForCausalLM.from_config(config, **code_trust())
    except (OSError, ValueError, KeyError) as error:
        raise EngineError(
            f"{model_dir} has no weights, and its architecture is not known: {error}"
        ) from error
    return {name: tuple(view.shape) for name, view in checkpoint_views(model, model_tensors(model)).items()}
