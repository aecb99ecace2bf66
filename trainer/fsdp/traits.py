"""Probes a model's outputs: whether samples can be packed, and whether the model changes its logits."""

from dataclasses import dataclass
from typing import Any

import torch

from protocol.errors import SettingsError
from trainer.data.prefix_tree import PrefixTree, RowFamily
from trainer.fsdp import attention
from trainer.fsdp.layout import KNOWN_TYPES
from trainer.fsdp.output_layer import OutputLayer
from trainer.fsdp.passes import stretches_of
from trainer.layers.attention.sequences import token_positions

EXACT = 1e-4
"""Largest difference between a float32 model's outputs for packed samples and for separate passes, relative
to the largest output."""
SAMPLE = 8
"""Tokens of each of the two probe samples."""


@dataclass(frozen=True, slots=True)
class Traits:
    """Facts about a model that determine its computation."""

    leaves_logits: bool
    """Whether the logits equal the output layer's output, and the layer has no bias."""
    why_rows: str
    """Why samples are rows with right padding; empty if samples are packed."""
    is_causal: bool = True
    """Whether a token's output is independent of later tokens."""
    is_finite: bool = True
    """Whether the outputs are finite; otherwise the other fields are unreliable."""
    conversions: Any = None
    """Weight conversions of transformers for the files, if they differ from those for saving."""

    def apply(self, model: Any) -> OutputLayer | None:
        """Replace attention and output layer of a model of the probed kind."""
        if self.conversions is not None:
            model._weight_conversions = self.conversions
        if not self.why_rows:
            model.set_attn_implementation(attention.NAME)
        return OutputLayer(model.get_output_embeddings()) if self.leaves_logits else None


def probe(model: Any, device: torch.device, dtype: torch.dtype, *, divided: bool = False) -> Traits:
    """Compute a few tokens with a sharded float32 model on a device. A collective.

    Args:
        dtype: dtype of the trainer's passes.
        divided: whether the model is tensor-parallel. Such a model computes differently with gradients, so
            a pass with gradients is run, too.

    Raises:
        SettingsError: `trainer.attention_backend` does not support the model's attention in this dtype.
    """
    if divided:
        _outputs(model, torch.arange(SAMPLE, device=device)[None] % model.config.get_text_config().vocab_size)
        model.reshard()
    with torch.no_grad():
        leaves_logits = OutputLayer.can_replace(model, device)
        ids = torch.arange(SAMPLE + SAMPLE // 2, device=device) % model.config.get_text_config().vocab_size
        alike = SAMPLE // 2
        separate_outputs = [
            _outputs(model, one[None]) for one in (ids[:SAMPLE], torch.cat([ids[:alike], ids[SAMPLE:]]))
        ]
        is_finite = all(bool(one.isfinite().all()) for one in separate_outputs)
        traits = Traits(
            leaves_logits,
            _packing_refusal(
                model, ids, torch.cat([separate_outputs[0], separate_outputs[1][alike:]]), dtype
            ),
            _difference(separate_outputs[0][:alike], separate_outputs[1][:alike]) <= EXACT,
            is_finite,
        )
    model.reshard()
    return traits


def _packing_refusal(
    model: Any, ids: torch.Tensor, separate_outputs: torch.Tensor, dtype: torch.dtype
) -> str:
    """Return why a model's samples cannot be packed; empty: they can.

    Two samples have a common prefix. Their outputs in one packed pass, which computes the prefix once, are
    compared with separate passes. The outputs differ if layers carry state from one sample to the next, or if
    the attention cannot be replaced.

    Args:
        ids: int64 [t], the first sample, then the second sample without the prefix.
        separate_outputs: outputs of separate passes, in the order of `ids`.
        dtype: dtype of the trainer's passes.
    """
    unknown = set(getattr(model.config, "layer_types", None) or ()) - KNOWN_TYPES
    if unknown:
        return f"layers of the types {', '.join(sorted(unknown))}"
    tree = PrefixTree.of([RowFamily((0, 1), (SAMPLE, SAMPLE), (0, SAMPLE // 2))])
    lengths, keys = stretches_of(tree)
    try:
        model.set_attn_implementation(attention.NAME)
        with attention.packed(lengths, ids.device, keys, probed_for=dtype):
            positions = token_positions(lengths, keys)[None].to(ids.device)
            together = _outputs(model, ids[None], position_ids=positions)
    except SettingsError:
        raise
    except (ValueError, RuntimeError, TypeError, LookupError) as error:
        return f"its attention cannot be replaced: {error}"
    difference = _difference(together, separate_outputs)
    return (
        "" if difference <= EXACT else f"outputs of packed samples are off by {difference:.2g} of the largest"
    )


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest expected output."""
    return float((found - expected).abs().max() / expected.abs().max())


def _outputs(model: Any, ids: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=ids, use_cache=False, **options)[0]
    return found.flatten(0, 1).double()
