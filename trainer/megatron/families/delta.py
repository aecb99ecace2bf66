"""Gated delta nets (Yang et al. 2024, arXiv 2412.06464), which replace attention: layers, sizes and rules."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.errors import SettingsError
from trainer.megatron.convert.rules import Direct, GroupRows, Interleaved, Rule, Split

Tables = list[tuple[str, tuple[int, ...], tuple[int, ...]]]

KINDS = ("linear_attention", "full_attention")
"""Values of `layer_types`; the first is a gated delta net."""


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Layers with a gated delta net, and its sizes. Each key head serves the same number of value heads."""

    layers: tuple[int, ...]
    """Indices of the layers, ascending."""
    key_heads: int
    value_heads: int
    key: int
    """Dimensions of a head's query and key."""
    value: int
    """Dimensions of a head's value."""
    kernel: int
    """Width in tokens of the convolution over queries, keys and values, including the token itself."""

    @property
    def values_of_key(self) -> int:
        """Number of value heads per key head."""
        return self.value_heads // self.key_heads

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int]:
        """Input projection rows per key head: query, key, values, gates of the values, strengths, decays."""
        heads = self.values_of_key
        return self.key, self.key, heads * self.value, heads * self.value, heads, heads

    @property
    def state_flops(self) -> int:
        """Operations per token on the states, forward and backward: two reads, and one product to add."""
        return 3 * 3 * 2 * self.value_heads * self.key * self.value

    def weights(self, hidden: int) -> int:
        """Return the number of elements of a layer's matrices."""
        return hidden * (self.key_heads * sum(self.sizes) + self.value_heads * self.value)


def delta_of(path: Path, config: dict[str, Any]) -> DeltaNet:
    """Read layers and sizes from a config.json.

    Args:
        path: path of the file, for errors.
        config: content of the file.

    Raises:
        SettingsError: a kind of layer is unknown, or key heads do not divide the value heads.
    """
    layers, every = int(config["num_hidden_layers"]), int(config.get("full_attention_interval") or 4)
    kinds = config.get("layer_types") or [KINDS[(layer + 1) % every == 0] for layer in range(layers)]
    if len(kinds) != layers or set(kinds) - set(KINDS):
        raise SettingsError(
            f"{path}: layer_types must name {layers} layers, each {' or '.join(KINDS)}: {kinds}"
        )
    key_heads, value_heads = int(config["linear_num_key_heads"]), int(config["linear_num_value_heads"])
    if value_heads % key_heads:
        raise SettingsError(
            f"{path}: linear_num_key_heads = {key_heads} does not divide the {value_heads} of "
            "linear_num_value_heads"
        )
    return DeltaNet(
        tuple(layer for layer, kind in enumerate(kinds) if kind == KINDS[0]),
        key_heads,
        value_heads,
        key=int(config["linear_key_head_dim"]),
        value=int(config["linear_value_head_dim"]),
        kernel=int(config["linear_conv_kernel_dim"]),
    )


def check_generation(delta: DeltaNet | None) -> None:
    """Check that the engine `megatron` can generate with a model.

    Raises:
        SettingsError: the model has gated delta nets, whose states the engine's cache does not support.
    """
    if delta:
        raise SettingsError(
            "engine megatron has no cache for the states of gated delta nets, which the model has: use hf, "
            "vllm or sglang"
        )


def delta_rules(delta: DeltaNet, inputs: str, hidden: int, mcore_prefix: str, hf_prefix: str) -> list[Rule]:
    """Return the rules of a layer. A tensor rank has a share of the key heads, with their value heads.

    Args:
        delta: sizes.
        inputs: format of the input projection. `by_head`: two tensors interleave their rows by key head, one
            of them with strengths and decays. `apart`: each kind of rows is a separate block.
        hidden: hidden size.
        mcore_prefix: prefix of the parameters in megatron.
        hf_prefix: prefix of the tensors in the checkpoint.
    """
    query, key, values, gates, strengths, decays = delta.sizes
    mixed = (query, key, values)
    found: list[tuple[str, tuple[int, ...]]]
    if inputs == "by_head":
        found = [("in_proj_qkvz", (sum(mixed) + gates,)), ("in_proj_ba", (strengths + decays,))]
    else:
        found = [
            ("in_proj_qkv", mixed),
            ("in_proj_z", (gates,)),
            ("in_proj_b", (strengths,)),
            ("in_proj_a", (decays,)),
        ]
    tables: Tables = [(f"{hf_prefix}{name}.weight", rows, (hidden,)) for name, rows in found]
    by_heads = (delta.value_heads,)
    return [
        _by_key_head(delta, mcore_prefix + "in_proj.weight", tables),
        _by_key_head(delta, mcore_prefix + "conv", [(hf_prefix + "conv1d.weight", mixed, (1, delta.kernel))]),
        Split(
            parameter=mcore_prefix + "dt_bias",
            name=hf_prefix + "dt_bias",
            shape=by_heads,
            unit=delta.values_of_key,
        ),
        Split(
            parameter=mcore_prefix + "a_log",
            name=hf_prefix + "A_log",
            shape=by_heads,
            unit=delta.values_of_key,
        ),
        Direct(parameter=mcore_prefix + "norm.weight", name=hf_prefix + "norm.weight", shape=(delta.value,)),
        Split(
            parameter=mcore_prefix + "out_proj.weight",
            name=hf_prefix + "out_proj.weight",
            shape=(hidden, delta.value_heads * delta.value),
            dim=1,
            unit=delta.values_of_key * delta.value,
        ),
    ]


def _by_key_head(delta: DeltaNet, parameter: str, tables: Tables) -> Rule:
    """Return the rule of a parameter whose rows are ordered by key head.

    `tables` lists the checkpoint's tensors: name, rows per key head by kind, other dimensions.
    """
    heads = delta.key_heads
    return Interleaved(
        parameter=parameter,
        tensors=tuple((name, (heads * sum(rows), *more)) for name, rows, more in tables),
        stretches=tuple(
            GroupRows(name, heads * sum(rows[:kind]), rows[kind])
            for name, rows, _ in tables
            for kind in range(len(rows))
        ),
        groups=heads,
    )
