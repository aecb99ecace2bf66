"""Holds a frozen transformers model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from protocol.device.hf_models import MODEL_BUILDING, apply_config, code_trust
from protocol.errors import SettingsError
from trainer.backends.base import FrozenModel
from trainer.batch import Batch
from trainer.reference.shards import local_tensor


def frozen(model: torch.nn.Module, evaluate: Callable[[Batch], torch.Tensor]) -> FrozenModel:
    """Freeze a model; return it with `evaluate`, which computes its per-token values."""
    model.requires_grad_(False)
    return FrozenModel(evaluate, [local_tensor(tensor) for tensor in (*model.parameters(), *model.buffers())])


def load_model(model_dir: Path, setting: str, *, with_head: bool = True, blank: bool = False) -> Any:
    """Return the model of a directory, float32, on the CPU.

    Args:
        model_dir: Hugging Face directory.
        setting: name of the setting with the directory, for errors.
        with_head: whether to load the output layer.
        blank: whether to leave parameters on the meta device and persistent buffers uninitialized.

    Raises:
        SettingsError: transformers cannot load the model.
    """
    transformers_logging.disable_progress_bar()
    before = transformers_logging.get_verbosity()
    if not with_head:
        transformers_logging.set_verbosity_error()  # or it reports the output layer's tensors as unexpected
    try:
        with MODEL_BUILDING:
            kind = AutoModelForCausalLM if with_head else AutoModel
            model: Any = (
                _blank(kind, model_dir)
                if blank
                else kind.from_pretrained(
                    model_dir, dtype=torch.float32, local_files_only=True, **code_trust()
                )
            )
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"{setting} {model_dir}: not a model that transformers can load: {error}"
        ) from error
    finally:
        transformers_logging.set_verbosity(before)
    for module in model.modules():
        # position embeddings, recognized by their class names, may use padding_idx for their offset
        if isinstance(module, torch.nn.Embedding) and "Position" not in type(module).__name__:
            module.padding_idx = None  # torch would not train this row, unlike other backends
    apply_config(model)
    return model.eval()


def _blank(kind: Any, model_dir: Path) -> Any:
    from accelerate import init_empty_weights  # slow import

    config = AutoConfig.from_pretrained(model_dir, local_files_only=True, **code_trust())
    with init_empty_weights(include_buffers=False):
        model = kind.from_config(config, dtype=torch.float32, **code_trust())
    model.tie_weights()
    return model


def architecture_of(model_dir: Path) -> str:
    """Return the class name of the model that `load_model` creates, without loading weights.

    Raises:
        SettingsError: transformers does not support the model.
    """
    try:
        with MODEL_BUILDING, torch.device("meta"):
            config = AutoConfig.from_pretrained(model_dir, local_files_only=True, **code_trust())
            return type(AutoModelForCausalLM.from_config(config, **code_trust())).__name__
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"model.path {model_dir}: not a model that transformers can load: {error}"
        ) from error


def in_dtype(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Convert a model's parameters in place, and return the model.

    Buffers keep their dtype: rotary frequencies are float32 in an engine, too.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model
