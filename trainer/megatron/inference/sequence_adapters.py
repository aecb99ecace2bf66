"""Adds the output of each sequence's named adapter to its row of a batch, by hooks on megatron's layers.

Shapes: S tokens of each of N sequences; the sequence index varies fastest.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from protocol.errors import SettingsError
from protocol.weights.lora import LoraConfig
from trainer.megatron.convert.rules import Rule
from trainer.megatron.layers import lora
from trainer.megatron.parallel import Position

NamedTensors = Mapping[str, tuple[LoraConfig, Mapping[str, torch.Tensor]]]
"""Name of an adapter -> its settings; A and B, with the scaling in B, by PEFT name."""
MERGED = "linear_kv_up_proj"
"""Layer of latent attention whose weight a decode step uses directly, for all sequences."""


class SequenceAdapters:
    """Shards of a model's named adapters on this rank, and the adapter of each row of the next pass."""

    def __init__(
        self, model: torch.nn.Module, rules: list[Rule], position: Position, adapters: NamedTensors
    ) -> None:
        """Register hooks on the layers with adapters.

        Args:
            model: the whole model, or this tensor rank's shard.
            rules: rules of the model without adapters.
            position: position of this rank.
            adapters: named adapters.

        Raises:
            SettingsError: an adapter changes an unsupported layer. The message names the adapter.
        """
        self._rows: Sequence[str] = ()
        layers: dict[str, dict[str, lora.Adapters]] = {}
        for name, (config, tensors) in adapters.items():
            try:
                shares = lora.shares(model, rules, config, position, tensors)
            except SettingsError as error:
                raise SettingsError(f"adapter {name!r}: {error}") from error
            for layer, share in shares.items():
                if layer.endswith(MERGED):
                    raise SettingsError(
                        f"adapter {name!r}: engine megatron has none by name for {', '.join(share)}; "
                        "remove it from the adapter"
                    )
                layers.setdefault(layer, {})[name] = share.requires_grad_(False)
        for layer, named in layers.items():
            model.get_submodule(layer).register_forward_hook(_hook(self, named))

    def choose(self, rows: Sequence[str]) -> None:
        """Set the adapter of each row of the next pass; "" means none. Empty `rows`: no adapters."""
        self._rows = rows if any(rows) else ()

    def add(
        self,
        layer: torch.nn.Module,
        named: Mapping[str, lora.Adapters],
        x: torch.Tensor,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """Return a layer's output plus its rows' adapters, [S, N, width] or [S * N, 1, width].

        All tensor ranks process the adapters in the same order, because some need sums over the ranks.
        """
        found = output.clone(memory_format=torch.contiguous_format)
        inputs, outputs = (values.reshape(-1, len(self._rows), values.shape[-1]) for values in (x, found))
        for name, adapters in named.items():
            if index := [number for number, row in enumerate(self._rows) if row == name]:
                chosen = outputs[:, index]
                outputs[:, index] = chosen + lora.added(layer, adapters, inputs[:, index], chosen)
        return found

    @property
    def is_on(self) -> bool:
        """Whether any row of the pass has an adapter."""
        return bool(self._rows)


def _hook(rows: SequenceAdapters, named: Mapping[str, lora.Adapters]) -> Any:
    def add(layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: Any) -> Any:
        return (rows.add(layer, named, inputs[0], output[0]), *output[1:]) if rows.is_on else output

    return add
