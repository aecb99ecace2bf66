"""Reads the numbers of layers with experts."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.errors import SettingsError
from trainer.config import ParallelConfig


@dataclass(frozen=True, slots=True)
class Experts:
    """Numbers of the layers whose MLP is a choice of experts for each token."""

    count: int = 0
    """Experts of a layer, over all ranks; 0: no layer has any."""
    per_token: int = 0
    """Experts that a token passes through."""
    intermediate: int = 0
    """Width of an expert."""
    shared_intermediate: int = 0
    """Width of the MLP that every token passes through beside its experts; 0: there is none."""
    shared_gate: bool = False
    """Whether a sigmoid of its own weighs that MLP for each token."""
    dense_layers: tuple[int, ...] = ()
    """Layers with an ordinary MLP instead, ascending, from 0."""
    scoring: str = "softmax"
    """What makes scores of the router's logits: softmax over the experts, or sigmoid."""
    normalized: bool = False
    """Whether the scores of a token's experts are divided by their sum."""
    bias: bool = False
    """Whether experts are chosen by the sum of score and a bias, which counts nowhere else."""
    scale: float = 1.0
    """Factor of what experts put out."""
    groups: int = 1
    """Groups of equally many experts, of which a token's are in a few."""
    groups_per_token: int = 1
    best_of_group: int = 1
    """How many of the best scores of a group add up to its own."""
    precise: bool = False
    """Whether logits are computed in float32 whatever the dtype of the weights."""
    biases: bool = False
    """Whether the router's logits and the experts have biases, which are parameters as others."""
    swiglu_limit: float = 0.0
    """Bound of gate and up projection, whose columns alternate where it is not 0; 0: there is none."""
    swiglu_alpha: float = 1.0
    """Factor within the gate's sigmoid; only with a limit."""

    def is_sparse(self, layer: int) -> bool:
        """Return whether a layer has experts."""
        return self.count > 0 and layer not in self.dense_layers

    def sparse_layers_before(self, layer: int) -> int:
        """Return how many layers with experts precede one."""
        return sum(self.is_sparse(other) for other in range(layer))


NO_EXPERTS = Experts()
COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Fields of config.json that hold the number of experts."""
SWIGLU = ("swiglu_limit", "swiglu_alpha")
"""Fields of config.json that families with these numbers may name."""


def check_ranks(experts: Experts, parallel: ParallelConfig) -> None:
    """Check what a layout asks of experts, beyond what the conversion's rules do.

    Raises:
        SettingsError: there are no experts to divide, or tensor ranks have the same tokens.
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
    """What a family calls the parts of a layer with experts, `model.layers.0.` before them."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    router: str = "gate"
    shared: str = ""
    """The MLP that every token passes through; empty: the family has none."""
    shared_gate: str = ""
    """Its gate, if it has one."""
    normalized: bool = False
    """`norm_topk_prob` of transformers where config.json does not name it."""
    stacked: bool = False
    """Whether the checkpoint has a tensor for all experts, in which matrices are transposed."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Values of `Experts` that config.json does not name."""
    fixed: Mapping[str, tuple[object, ...]] = dataclasses.field(default_factory=dict)
    """Fields of config.json and what they may be, that of transformers first where the field is not named."""


def experts_of(path: Path, config: dict[str, Any], names: ExpertNames) -> Experts:
    """Read them from the config.json of a family with experts; `path` is that of the file, for errors.

    Raises:
        SettingsError: tokens cannot choose so many experts, or the router is to be disturbed at random.
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
    """Return the layers without experts."""
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
    """Read the groups of experts, where a token's choice is limited to some of them."""
    groups, chosen = int(config.get("n_group") or 1), int(config.get("topk_group") or 1)
    methods = names.fixed.get("topk_method", ("",))
    if groups == 1 or config.get("topk_method", methods[0]) == "greedy":
        return {}
    if count % groups or not 1 <= chosen <= groups:
        raise SettingsError(
            f"{path}: n_group = {groups} and topk_group = {chosen} do not divide {count} experts"
        )
    return {"groups": groups, "groups_per_token": chosen}
