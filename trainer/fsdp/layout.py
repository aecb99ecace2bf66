"""Lists the layouts of ranks that the FSDP backend supports. Does not import torch: every start uses it."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from protocol.errors import SettingsError
from trainer.config import ParallelConfig, TrainerConfig

SIZES = ("data_parallel_size", "tensor_model_parallel_size", "use_distributed_optimizer")
"""Settings of `[parallel]` that the backend supports."""
NOT_SHARDED = "trainer.backend 'fsdp' supports only data- and tensor-parallel ranks"
OTHER_LAYERS = "name other layers, use 'all-linear', or set parallel.tensor_model_parallel_size to 1"
TENSOR_SIZE = "parallel.tensor_model_parallel_size"
KNOWN_TYPES = frozenset({"full_attention", "sliding_attention"})
"""Layer types, as in config.json, whose attention the kernels of both backends support."""
TP_MODULE = "transformers.distributed.tensor_parallel"
"""Module of transformers that shards layers."""
TABLES = ("embed_tokens", "lm_head")
"""Usual names of a model's embedding and output layer."""


def layout_refusals(parallel: ParallelConfig) -> Iterator[tuple[str, object]]:
    """Yield name and value of each setting in `[parallel]` that is set and unsupported."""
    default = ParallelConfig()
    for field in fields(parallel):
        value = getattr(parallel, field.name)
        if field.name not in SIZES and value != getattr(default, field.name):
            yield f"parallel.{field.name}", value


def tensor_rank_refusals(parallel: ParallelConfig, trainer: TrainerConfig) -> Iterator[tuple[str, str]]:
    """Yield (cause, remedy) for each reason why the requested tensor-parallel ranks are unsupported."""
    if parallel.tensor_model_parallel_size == 1:
        return
    unsupported = {
        "compiled (trainer.compile)": trainer.compile,
        "in FP8 (trainer.fp8)": trainer.fp8 != "off",
    }
    for name, is_set in unsupported.items():
        if is_set:
            cause = f"layers of tensor-parallel ranks of trainer.backend 'fsdp' are not {name}"
            yield cause, "remove one of the two settings"
    if not _supports_tensor_parallelism():
        cause = f"trainer.backend 'fsdp' divides layers by {TP_MODULE}, which transformers"
        yield f"{cause} {version('transformers')} lacks", "use data-parallel ranks, or a newer transformers"


def _supports_tensor_parallelism() -> bool:
    """Return whether the installed transformers can shard a model's layers, without importing it."""
    found = find_spec("transformers")
    places = found.submodule_search_locations if found else None
    file = Path(*TP_MODULE.split(".")[1:]).with_suffix(".py")
    return any((Path(place) / file).is_file() for place in places or ())


def check_layout(parallel: ParallelConfig, trainer: TrainerConfig) -> None:
    """Check that a layout has only data-parallel and tensor-parallel ranks.

    Raises:
        SettingsError: the layout is unsupported; the message names the setting.
    """
    for setting, value in layout_refusals(parallel):
        raise SettingsError(f"setting {setting}: {value}: {NOT_SHARDED}; remove the setting, or use megatron")
    for cause, remedy in tensor_rank_refusals(parallel, trainer):
        raise SettingsError(
            f"setting {TENSOR_SIZE}: {parallel.tensor_model_parallel_size}: {cause}; {remedy}"
        )


def plan_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return transformers' tensor-parallel plan for the model type in config.json; empty without a plan."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # slow import

    kind = (config.get("text_config") or config).get("model_type")
    known = CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else None  # noqa: SIM401 (a lazy mapping)
    return dict(getattr(known, "base_model_tp_plan", None) or {})


def style_of(name: str, plan: Mapping[str, str]) -> str:
    """Return the style in which a plan shards a checkpoint's tensor; empty: each rank has the whole tensor.

    A plan has one name for all experts of a layer, whose matrices transformers merges. Embedding and output
    layer stay whole, regardless of the plan.
    """
    if ".experts." in name and any(".experts." in key for key in plan):
        return "rowwise" if "down_proj" in name or ".w2." in name else "colwise"
    module = name.rpartition(".")[0]
    style = _style(module, plan)
    is_table = style.startswith("embedding") or module.endswith(TABLES)
    return style if "wise" in style and not is_table else ""


def adapter_refusal(plan: Mapping[str, str], modules: Iterable[str], ranks: int) -> str:
    """Return why tensor-parallel ranks do not support adapters on some layers; empty: supported.

    In the first layer of latent attention, the plan reduces the gradient of only one part of the output. An
    adapter would therefore get a partial gradient.
    """
    partial = [module for module in modules if _style(module, plan) == "mla_kv_a_proj"]
    if ranks == 1 or not partial:
        return ""
    return f"tensor-parallel ranks of trainer.backend 'fsdp' have no adapter on {partial[0]}"


def _style(module: str, plan: Mapping[str, str]) -> str:
    name = re.sub(r"\.\d+\.", ".*.", module)
    return next((style for key, style in plan.items() if name.endswith(key)), "")


def division_refusal(plan: Mapping[str, str], config: Mapping[str, Any], ranks: int) -> str:
    """Return why tensor-parallel ranks cannot shard the layers of a model; empty: they can.

    Args:
        plan: tensor-parallel plan of transformers for this model type.
        config: config.json of the model, or of its text model.
    """
    if ranks == 1:
        return ""
    if not plan:
        return f"transformers has no tensor-parallel plan for model_type {config.get('model_type')!r}"
    for name in ("num_attention_heads", "num_key_value_heads"):
        if (config.get(name) or 0) % ranks:
            return f"it does not divide the model's {name} {config[name]}"
    return ""
