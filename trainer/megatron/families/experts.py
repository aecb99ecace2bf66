"""Layers with experts: their sizes in config.json, their names in a checkpoint, and their rules."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.errors import SettingsError
from trainer.config import ParallelConfig
from trainer.megatron.convert.rules import Direct, ExpertStack, ExpertTensor, GatedMLP, Rule, Split


@dataclass(frozen=True, slots=True)
class Experts:
    """Sizes and routing of layers in which each token uses a few experts instead of one MLP."""

    count: int = 0
    """Number of experts of a layer, over all ranks; 0: no layer has experts."""
    per_token: int = 0
    """Number of experts per token."""
    intermediate: int = 0
    """Width of an expert."""
    shared_intermediate: int = 0
    """Width of the shared MLP, which processes every token in addition; 0: no shared MLP."""
    shared_gate: bool = False
    """Whether a learned sigmoid gate scales the shared MLP's output of each token."""
    dense_layers: tuple[int, ...] = ()
    """Indices of the layers with an ordinary MLP, ascending."""
    scoring: str = "softmax"
    """Function from the router's logits to scores: `softmax` over the experts, or `sigmoid`."""
    normalized: bool = False
    """Whether the scores of a token's experts are divided by their sum."""
    bias: bool = False
    """Whether experts are chosen by score plus bias. The output is weighted by the score alone."""
    scale: float = 1.0
    """Factor of the experts' output."""
    groups: int = 1
    """Number of equal groups of experts."""
    groups_per_token: int = 1
    """Number of best-scored groups from which a token's experts are chosen."""
    best_of_group: int = 1
    """Number of a group's best experts whose scores are summed to the group's score."""
    precise: bool = False
    """Whether logits are computed in float32 even if the weights have another dtype."""
    biases: bool = False
    """Whether the router's logits and the experts have trained biases."""
    swiglu_limit: float = 0.0
    """Bound of the outputs of gate and up projection, whose columns are then interleaved. 0: unbounded."""
    swiglu_alpha: float = 1.0
    """Factor inside the gate's sigmoid; used only with `swiglu_limit`."""

    def is_sparse(self, layer: int) -> bool:
        """Return whether a layer has experts."""
        return self.count > 0 and layer not in self.dense_layers

    def sparse_layers_before(self, layer: int) -> int:
        """Return the number of layers with experts before this layer."""
        return sum(self.is_sparse(other) for other in range(layer))


NO_EXPERTS = Experts()
COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Fields of config.json with the number of experts."""
SWIGLU = ("swiglu_limit", "swiglu_alpha")
"""Fields of config.json for the bounded activation; read only if the family's defaults include them."""


def check_ranks(experts: Experts, parallel: ParallelConfig) -> None:
    """Check that a layout fits the experts. The rules check divisibility.

    Raises:
        SettingsError: the model has no experts to split, or tensor ranks would process the same tokens.
    """
    for field in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
        if (size := getattr(parallel, field)) > 1 and not experts.count:
            raise SettingsError(
                f"setting parallel.{field}: {size}, but the model has no experts: set it to 1"
            )
    tp = parallel.tensor_model_parallel_size
    if experts.count and tp > 1 and not parallel.sequence_parallel:
        raise SettingsError(
            f"setting parallel.sequence_parallel: false, but a model with experts on {tp} tensor ranks needs "
            "it: set it to true"
        )


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of a family's experts below `model.layers.0.` in checkpoints, and defaults of `Experts`.

    The default names are Qwen3-MoE's.
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    router: str = "gate"
    shared: str = ""
    """Name of the shared MLP; empty: no shared MLP."""
    shared_gate: str = ""
    """Name of the shared MLP's gate; empty: no gate."""
    normalized: bool = False
    """Default of `norm_topk_prob` in transformers."""
    stacked: bool = False
    """Whether one tensor of the checkpoint has all experts of a layer, with transposed matrices."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of `Experts` for the whole family; config.json may override the fields in `SWIGLU`."""
    fixed: Mapping[str, tuple[object, ...]] = dataclasses.field(default_factory=dict)
    """Field of config.json -> its supported values, the default of transformers first."""


def experts_of(path: Path, config: dict[str, Any], names: ExpertNames) -> Experts:
    """Read the numbers of experts from the config.json of a family with experts.

    Args:
        path: path of the file, for errors.
        config: content of the file.
        names: names of the family.

    Raises:
        SettingsError: the number of chosen experts is invalid, or the router is not supported. The message
            names the field.
    """
    layers = int(config["num_hidden_layers"])
    dense = _dense_layers(config, layers)
    if len(dense) == layers:
        return NO_EXPERTS
    count = next((int(config[name]) for name in COUNTS if config.get(name)), 0)
    chosen = int(config.get("num_experts_per_tok") or 0)
    if not 1 <= chosen <= count:
        raise SettingsError(f"{path}: num_experts_per_tok = {chosen} of {count} experts cannot be chosen")
    _refuse_other_routers(path, config, names)
    wide = int(config.get("moe_intermediate_size") or config["intermediate_size"])
    shared = config.get("shared_expert_intermediate_size") or wide * (config.get("n_shared_experts") or 0)
    values: dict[str, Any] = {**names.defaults, **_groups(path, config, count, names)}
    values |= {name: float(config[name]) for name in SWIGLU if name in values and name in config}
    return Experts(
        count,
        chosen,
        intermediate=wide,
        shared_intermediate=int(shared) if names.shared else 0,
        shared_gate=bool(names.shared_gate),
        dense_layers=dense,
        normalized=bool(config.get("norm_topk_prob", names.normalized)),
        scale=float(config.get("routed_scaling_factor") or 1.0),
        **values,
    )


def _dense_layers(config: dict[str, Any], layers: int) -> tuple[int, ...]:
    """Return the indices of the layers without experts."""
    first, step = int(config.get("first_k_dense_replace") or 0), int(config.get("decoder_sparse_step") or 1)
    dense = config.get("mlp_only_layers") or ()
    return tuple(layer for layer in range(layers) if layer < first or layer in dense or (layer + 1) % step)


def _refuse_other_routers(path: Path, config: dict[str, Any], names: ExpertNames) -> None:
    for name, allowed in names.fixed.items():
        if config.get(name) is not None and config[name] not in allowed:
            raise SettingsError(
                f"{path}: {name} = {config[name]!r} is not supported in {config['model_type']}: it must be "
                f"{' or '.join(map(repr, allowed))}"
            )
    if config.get("router_jitter_noise"):
        raise SettingsError(
            f"{path}: router_jitter_noise = {config['router_jitter_noise']!r} is not supported by the "
            "megatron backend"
        )


def _groups(path: Path, config: dict[str, Any], count: int, names: ExpertNames) -> dict[str, int]:
    """Return the fields of `Experts` that limit a token's choice to some groups; empty without limit."""
    groups, chosen = int(config.get("n_group") or 1), int(config.get("topk_group") or 1)
    methods = names.fixed.get("topk_method", ("",))
    if groups == 1 or config.get("topk_method", methods[0]) == "greedy":
        return {}
    if count % groups or not 1 <= chosen <= groups:
        raise SettingsError(
            f"{path}: n_group = {groups} and topk_group = {chosen} do not divide {count} experts"
        )
    return {"groups": groups, "groups_per_token": chosen}


def expert_rules(
    experts: Experts, names: ExpertNames, hidden: int, mcore_prefix: str, hf_prefix: str
) -> list[Rule]:
    """Return the rules of a layer's router and experts.

    Args:
        experts: numbers of the model's experts.
        names: names in the checkpoint.
        hidden: hidden size.
        mcore_prefix: prefix of the parameters in megatron.
        hf_prefix: prefix of the tensors in the checkpoint.
    """
    rules = _router_rules(experts, hidden, f"{mcore_prefix}router.", f"{hf_prefix}{names.router}.")
    if names.stacked:
        return rules + _stacked_rules(experts, hidden, f"{mcore_prefix}experts.", f"{hf_prefix}experts.")
    wide, fc1, fc2 = experts.intermediate, f"{mcore_prefix}experts.fc1", f"{mcore_prefix}experts.fc2"
    prefixes = [f"{hf_prefix}experts.{number}." for number in range(experts.count)]
    into = tuple(
        GatedMLP(
            parameter=fc1,
            names=(f"{prefix}{names.gate}.weight", f"{prefix}{names.up}.weight"),
            shape=(wide, hidden),
        )
        for prefix in prefixes
    )
    out = tuple(
        Split(parameter=fc2, name=f"{prefix}{names.down}.weight", shape=(hidden, wide), dim=1)
        for prefix in prefixes
    )
    return [*rules, ExpertStack(parameter=fc1, rules=into), ExpertStack(parameter=fc2, dim=1, rules=out)]


def _router_rules(experts: Experts, hidden: int, mcore_prefix: str, hf_prefix: str) -> list[Rule]:
    count = (experts.count,)
    rules: list[Rule] = [
        Direct(parameter=f"{mcore_prefix}weight", name=f"{hf_prefix}weight", shape=(*count, hidden))
    ]
    if experts.biases:
        rules.append(Direct(parameter=f"{mcore_prefix}logit_bias", name=f"{hf_prefix}bias", shape=count))
    if experts.bias:
        name = f"{hf_prefix}e_score_correction_bias"
        rules.append(Direct(parameter=f"{mcore_prefix}bias", name=name, shape=count, exact=True))
    return rules


def _stacked_rules(experts: Experts, hidden: int, mcore_prefix: str, hf_prefix: str) -> list[Rule]:
    """Return the rules of experts with biases, whose matrices are transposed in the checkpoint.

    Gate and up columns are interleaved, so pairs of columns stay on one rank.
    """
    count, wide = experts.count, experts.intermediate

    def rule(parameter: str, name: str, *matrix: int, dim: int = 0, unit: int = 1) -> Rule:
        return ExpertTensor(
            parameter=mcore_prefix + parameter,
            name=hf_prefix + name,
            shape=(count, *matrix),
            dim=dim,
            unit=unit,
        )

    return [
        rule("fc1", "gate_up_proj", hidden, 2 * wide, dim=1, unit=2),
        rule("fc1_bias", "gate_up_proj_bias", 2 * wide, unit=2),
        rule("fc2", "down_proj", wide, hidden),
        rule("fc2_bias", "down_proj_bias", hidden),
    ]
