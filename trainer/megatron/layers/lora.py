"""Adds LoRA adapters to megatron's parallel layers, split like the layers.

`trainer/megatron/convert/adapters.py` defines their rules. A column-parallel layer (qkv, gate and up) has A
on every tensor rank and the rank's rows of B. A row-parallel layer (output, down) has the rank's columns of A
and B on every rank. Fused layers have one adapter per fused tensor, below megatron's layer:

    decoder.layers.0.self_attention.linear_qkv.lora.q_proj.a
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

from protocol.errors import SettingsError
from protocol.weights.lora import LoraConfig, adapter_targets
from trainer.lora import AdapterSwitch, initial_adapters
from trainer.megatron.convert.adapters import lora_rules
from trainer.megatron.convert.rules import Direct, FusedQKV, Rule
from trainer.megatron.layers.tensor_parallel import mark_split
from trainer.megatron.layout import Grid
from trainer.megatron.parallel import Position


class LowRank(torch.nn.Module):
    """This rank's shards of A and B of one Hugging Face weight."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Parameter(a), torch.nn.Parameter(b)


class Adapters(torch.nn.ModuleDict, AdapterSwitch):
    """Adapters of one layer, registered as submodule `lora`; keys are the last part of the weight's name."""

    scaling: float
    """Factor of B A."""
    groups: int
    """Number of key-value heads of this rank; set only for qkv, like `head_dim`."""
    head_dim: int
    gated: bool
    """Whether each query head is followed by the gate of its output; set only for qkv."""
    sequence_parallel: bool
    tp: tuple[int, int]
    """Tensor rank, and number of tensor ranks."""


def attach(
    model: torch.nn.Module, rules: list[Rule], config: LoraConfig, position: Position, seed: int
) -> dict[str, torch.Tensor]:
    """Freeze the model and add this rank's shards of the adapters; return their parameters.

    Args:
        model: this rank's shard of the model, see `whole_part`.
        rules: rules of this rank's pipeline stage, without adapters.
        config: rank, scaling and target modules.
        position: this rank's position in the layout.
        seed: seed of the initial values.

    Returns:
        megatron name -> parameter.

    Raises:
        SettingsError: the adapters cannot be split over the tensor ranks.
    """
    model.requires_grad_(False)
    shapes = {name: shape for rule in rules for name, shape in rule.shapes.items()}
    first = initial_adapters(adapter_targets(shapes, config), config, seed)
    for name, adapters in shares(model, rules, config, position, first).items():
        layer: Any = model.get_submodule(name)
        layer.lora = adapters
        layer.register_forward_hook(_hook)
    parameters: dict[str, torch.Tensor] = {
        name: parameter for name, parameter in model.named_parameters() if ".lora." in name
    }
    mark_split(parameters, lora_rules(rules, config))
    return parameters


def shares(
    model: torch.nn.Module,
    rules: list[Rule],
    config: LoraConfig,
    position: Position,
    tensors: Mapping[str, torch.Tensor],
) -> dict[str, Adapters]:
    """Return this rank's shards of A and B by layer name, without adding them to the layers.

    Args:
        model, rules, config, position: as in `attach`.
        tensors: A and B by PEFT name; layers without tensors have no adapter.

    Raises:
        SettingsError: the adapters cannot be split over the tensor ranks.
    """
    grid = Grid(position.config.tensor_model_parallel_size)
    heads = {rule.parameter: rule for rule in rules if isinstance(rule, FusedQKV)}
    adapter_rules = lora_rules(rules, config)
    found: dict[str, Adapters] = {}
    for a, b in zip(adapter_rules[::2], adapter_rules[1::2], strict=True):
        name, _, key = a.parameter.removesuffix(".a").rpartition(".lora.")
        if not a.shapes.keys() <= tensors.keys():
            continue
        if name not in found:
            found[name] = _empty(heads.get(f"{name}.weight"), config, position)
        like: Any = model.get_submodule(name).weight
        found[name][key] = pair = LowRank(
            *(_share(tensors, rule, grid, position.place.tp).to(like.device, like.dtype) for rule in (a, b))
        )
        # With sequence parallelism, each rank has only its tokens of a row-parallel layer's output. The
        # attribute makes megatron sum the gradients.
        pair.b.sequence_parallel = position.sequence_parallel and isinstance(b, Direct)  # type: ignore[attr-defined]
    return found


def added(layer: torch.nn.Module, adapters: Adapters, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Return the adapters' addend to the output of a layer, shaped as `output`, for inputs x."""
    kind = next(kind for kind in _ADDED if isinstance(layer, kind))
    return adapters.scaling * _ADDED[kind](adapters, x, output)


def adapted_weight(layer: Any) -> torch.Tensor:
    """Return W + scaling B A of an unfused column-parallel layer; W without an adapter."""
    weight: torch.Tensor = layer.weight
    adapters: Adapters | None = getattr(layer, "lora", None)
    if adapters is None or not adapters.is_on:
        return weight
    pair: Any = next(iter(adapters.values()))
    return torch.addmm(weight, pair.b, pair.a, alpha=adapters.scaling)


def _empty(rule: FusedQKV | None, config: LoraConfig, position: Position) -> Adapters:
    adapters = Adapters()
    adapters.scaling = config.scaling
    adapters.sequence_parallel = position.sequence_parallel
    adapters.tp = position.place.tp, position.config.tensor_model_parallel_size
    if rule is not None:
        tp = position.config.tensor_model_parallel_size
        if rule.groups % tp:
            raise SettingsError(
                f"lora with tensor_model_parallel_size = {tp}: it must divide the {rule.groups} key-value "
                "heads"
            )
        adapters.groups, adapters.head_dim = rule.groups // tp, rule.head_dim
        adapters.gated = rule.gated
    return adapters


def _share(tensors: Mapping[str, torch.Tensor], rule: Rule, grid: Grid, rank: int) -> torch.Tensor:
    (segment,) = (segment for segment in rule.segments(grid) if segment.rank == rank)
    share = tensors[segment.name].narrow(rule.dim, segment.start, segment.length)
    return share.clone(memory_format=torch.contiguous_format)  # a view would keep the whole tensor alive


def _hook(layer: Any, inputs: tuple[torch.Tensor, ...], output: Any) -> Any:
    adapters: Adapters = layer.lora
    if not adapters.is_on:
        return output
    return output[0] + added(layer, adapters, inputs[0], output[0]), *output[1:]


def _to_column(adapters: Adapters, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Return B A x of a column-parallel layer, in the order of the layer's rows."""
    if adapters.sequence_parallel:
        x = gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False)
    deltas = {key: _column(adapters.dropped(x), pair) for key, pair in adapters.items()}
    return _in_order(adapters, deltas, output)


def _column(x: torch.Tensor, pair: Any) -> torch.Tensor:
    # Each rank sees only its rows of B, so the gradient with respect to B's input is a sum over the ranks.
    inner: torch.Tensor = copy_to_tensor_model_parallel_region(F.linear(x, pair.a))
    return F.linear(inner, pair.b)


def _in_order(adapters: Adapters, deltas: Mapping[str, torch.Tensor], output: torch.Tensor) -> torch.Tensor:
    """Arrange the deltas in the row order of the fused layer; zeros where there is no adapter."""
    lead = output.shape[:-1]
    if "gate_proj" in deltas or "up_proj" in deltas:
        half = output.new_zeros(*lead, output.shape[-1] // 2)
        return torch.cat([deltas.get("gate_proj", half), deltas.get("up_proj", half)], dim=-1)
    if not hasattr(adapters, "groups"):  # an unfused projection
        return next(iter(deltas.values()))
    groups, head_dim = adapters.groups, adapters.head_dim
    queries = output.shape[-1] // (groups * head_dim) - 2
    if adapters.gated and "q_proj" in deltas:  # the layer stores a group's gates after its queries
        by_head = deltas["q_proj"].view(*lead, groups, queries // 2, 2, head_dim)
        deltas = {**deltas, "q_proj": by_head.transpose(-2, -3).contiguous()}
    parts = [
        deltas[key].view(*lead, groups, heads * head_dim)
        if key in deltas
        else output.new_zeros(*lead, groups, heads * head_dim)
        for key, heads in (("q_proj", queries), ("k_proj", 1), ("v_proj", 1))
    ]
    return torch.cat(parts, dim=-1).flatten(-2)


def _to_row(adapters: Adapters, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Return B A x of a row-parallel layer."""
    pair: Any = next(iter(adapters.values()))
    inner = F.linear(adapters.dropped(x, *adapters.tp), pair.a)  # of this rank's columns only
    if adapters.sequence_parallel:
        inner = reduce_scatter_to_sequence_parallel_region(inner)
    else:
        inner = reduce_from_tensor_model_parallel_region(inner)
    return F.linear(inner, pair.b)


_ADDED = {ColumnParallelLinear: _to_column, RowParallelLinear: _to_row}
