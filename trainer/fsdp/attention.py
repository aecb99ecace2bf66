"""Computes attention of transformers models over packed sequences, by the kernels of both backends.

A model with the attention `NAME` gets no mask: `packed` sets the sequences.

Shapes: T tokens of a pass, D size of a head's query and key, V size of its value.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface

from trainer.layers.attention.kernels import by_segments, kernel_for, packed_attention
from trainer.layers.attention.sequences import PackedSequences
from trainer.layers.attention.terms import AttentionTerms
from trainer.layers.attention.visible import VisibleKeys

NAME = "tether_packed"
"""Name of the attention implementation in transformers."""
_sequences: PackedSequences | None = None
_probed_for: torch.dtype | None = None


@contextmanager
def packed(
    lengths: Sequence[int],
    device: torch.device,
    keys: VisibleKeys | None = None,
    *,
    probed_for: torch.dtype | None = None,
) -> Iterator[None]:
    """Set the sequence lengths of attention within the block, forward and backward.

    Args:
        lengths: tokens of each sequence.
        keys: on the host: keys that each sequence sees, if the sequences are stretches of samples.
        probed_for: dtype of the trainer's passes, if the block probes a float32 model. Attention is then
            computed by segments, and refused if the trainer's kernel does not support this dtype.
    """
    global _sequences, _probed_for
    _probed_for = probed_for
    _sequences = PackedSequences.of(lengths, device, segmented=True, keys=() if keys is None else (keys,))
    try:
        yield
    finally:
        _sequences = _probed_for = None


@torch.compiler.disable  # each pass has other sequences, which would recompile the layer
def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Map query [1, heads, T, D], key [1, kv heads, T, D] and value [1, kv heads, T, V] to [1, T, heads, V].

    The signature is that of attention functions in transformers; `s_aux` are the attention sinks of the
    heads.

    Raises:
        SettingsError: `trainer.attention_backend` does not support this attention.
    """
    if _sequences is None:
        raise RuntimeError(f"attention {NAME!r} outside of a packed pass")
    terms = AttentionTerms(
        scale=scaling, window=sliding_window or 0, softcap=softcap or 0.0, sinks=s_aux is not None
    )
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if _probed_for is None:
        return packed_attention(q, k, v, _sequences, terms, s_aux)[None], None
    kernel_for(query.device.type, _probed_for, terms)
    return by_segments(q, k, v, _sequences, terms, s_aux)[None], None


AttentionInterface.register(NAME, attend)
