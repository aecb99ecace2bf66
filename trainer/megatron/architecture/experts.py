"""Reads the numbers of layers with experts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.errors import SettingsError


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
    dense_layers: tuple[int, ...] = ()
    """Layers with an ordinary MLP instead, ascending, from 0."""
    scoring: str = "softmax"
    """What makes scores of the router's logits: softmax over the experts, or sigmoid."""
    normalized: bool = False
    """Whether the scores of a token's experts are divided by their sum."""
    scale: float = 1.0
    """Factor of what experts put out."""

    def is_sparse(self, layer: int) -> bool:
        """Return whether a layer has experts."""
        return self.count > 0 and layer not in self.dense_layers


NO_EXPERTS = Experts()


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What a family calls the parts of a layer with experts, `model.layers.0.` before them."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = ""
    """The MLP that every token passes through; empty: the family has none."""
    shared_gate: str = ""
    """Its gate, if it has one."""
    normalized: bool = False
    """`norm_topk_prob` of transformers where config.json does not name it."""


def experts_of(path: Path, config: dict[str, Any], names: ExpertNames) -> Experts:
    """Read them from the config.json of a family with experts; `path` is that of the file, for errors.

    Raises:
        SettingsError: tokens cannot choose so many experts, or the router is to be disturbed at random.
    """
    count = int(config.get("num_local_experts") or config.get("num_experts") or 0)
    chosen = int(config["num_experts_per_tok"])
    if not 1 <= chosen <= count:
        raise SettingsError(f"{path}: num_experts_per_tok = {chosen} of {count} experts cannot be chosen")
    if config.get("router_jitter_noise"):
        raise SettingsError(
            f"{path}: router_jitter_noise = {config['router_jitter_noise']!r} is not supported by the "
            "megatron backend"
        )
    step, dense = int(config.get("decoder_sparse_step") or 1), config.get("mlp_only_layers") or ()
    layers = range(int(config["num_hidden_layers"]))
    return Experts(
        count,
        chosen,
        intermediate=int(config.get("moe_intermediate_size") or config["intermediate_size"]),
        shared_intermediate=int(config.get("shared_expert_intermediate_size") or 0) if names.shared else 0,
        dense_layers=tuple(layer for layer in layers if layer in dense or (layer + 1) % step),
        normalized=bool(config.get("norm_topk_prob", names.normalized)),
    )
