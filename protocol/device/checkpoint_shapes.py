"""Reads the names and shapes of a checkpoint's tensors without loading them."""

import json
import struct
from pathlib import Path

import torch

from protocol.device.checkpoint_views import checkpoint_views, model_tensors
from protocol.device.hf_models import MODEL_BUILDING, code_trust
from protocol.errors import EngineError

MAX_HEADER_BYTES = 100 << 20
"""Limit on the header of a safetensors file, as in the safetensors library."""


def checkpoint_shapes(model_dir: Path) -> dict[str, list[int]]:
    """Return name -> shape of a model's checkpoint tensors.

    From the headers of its safetensors files, or from its architecture if there are no files.

    Raises:
        EngineError: a file cannot be read, or the architecture is not known.
    """
    shapes: dict[str, list[int]] = {}
    for path in sorted(model_dir.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                (size,) = struct.unpack("<Q", file.read(8))
                if size > MAX_HEADER_BYTES:
                    raise ValueError(f"a header of {size} bytes")
                header = json.loads(file.read(size))
            shapes |= {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            raise EngineError(f"{path}: {error}") from error
    return shapes or _architecture_shapes(model_dir)


def _architecture_shapes(model_dir: Path) -> dict[str, list[int]]:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with MODEL_BUILDING, torch.device("meta"):
            config = AutoConfig.from_pretrained(model_dir, **code_trust())
            model = AutoModelForCausalLM.from_config(config, **code_trust())
    except (OSError, ValueError, KeyError) as error:
        raise EngineError(
            f"{model_dir} has no weights, and its architecture is not known: {error}"
        ) from error
    return {name: list(view.shape) for name, view in checkpoint_views(model, model_tensors(model)).items()}
