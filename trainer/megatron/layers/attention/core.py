"""Chooses how attention over packed sequences is computed, and makes it the core of megatron's layers.

Shapes: T tokens, D size of a head's query and key, V of its value, mostly the same; heads are this tensor
rank's.
"""

import trainer.megatron.cpu  # noqa: F401 (before megatron-core)

# isort: split
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from protocol.errors import SettingsError
from trainer.config import AttentionBackend
from trainer.megatron.layers.attention import fused
from trainer.megatron.layers.attention.backends import LIBRARIES, lacks_terms
from trainer.megatron.layers.attention.context import gather_visible, spread_queries
from trainer.megatron.layers.attention.segmented import segmented_attention
from trainer.megatron.layers.attention.sequences import PackedSequences
from trainer.megatron.layers.attention.terms import PLAIN, AttentionTerms

Kernel = Callable[..., torch.Tensor]
"""(q [T, heads, D], k [T, kv heads, D], v like k, sequences, terms) -> [T, heads, D]; causal within each
sequence. `by_segments` also takes v [T, kv heads, V], and gives [T, heads, V]. Kernels with the term `sinks`
take these, [heads], as the last argument. With context parallelism there are more keys and values than T:
`sequences.keys` says which."""


def by_segments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sequences: PackedSequences,
    terms: AttentionTerms,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute it with torch's attention, a segment at a time: anywhere, and as the reference for others."""
    if (keys := sequences.keys) is not None:
        q = spread_queries(q, keys)
    numbers = terms.scale, terms.window, terms.softcap
    out = segmented_attention(q, k, v, sequences.segments, *numbers, sinks)
    return out if keys is None else out.index_select(0, keys.queries)


FUSED: dict[str, Kernel] = {
    "torch": fused.varlen_attention,
    "flash_attn": fused.flash_attention,
    "transformer_engine": fused.transformer_engine_attention,
}
"""`trainer.attention_backend` -> its fused kernel; `segments` has none."""
_backend = "torch"
"""The backend of this process, see `choose_backend`."""


def choose_backend(name: AttentionBackend) -> None:
    """Have every model of this process compute attention by `trainer.attention_backend`."""
    global _backend
    _backend = "torch" if name == "auto" else name
    kernel_for.cache_clear()


@functools.cache
def kernel_for(device_type: str, dtype: torch.dtype, terms: AttentionTerms = PLAIN) -> Kernel:
    """Return the kernel of the chosen backend; torch has `by_segments` where its fused one does not compute.

    Raises:
        SettingsError: flash_attn or transformer_engine is chosen and cannot compute it.
    """
    lacking = "" if _backend == "segments" else lacks_terms(_backend, terms)
    fits = device_type == "cuda" and dtype in (torch.bfloat16, torch.float16) and not lacking
    if _backend in LIBRARIES and not fits:
        why = lacking or f"it computes on CUDA in 16 bits, and this is {device_type}, {dtype}"
        raise SettingsError(f"setting trainer.attention_backend: {_backend}: {why}; use torch")
    return FUSED[_backend] if fits and _backend in FUSED else by_segments


class PackedAttention(MegatronModule):
    """Attention of a training layer; it also rotates queries and keys, so that recomputing it keeps less."""

    def __init__(self, config: TransformerConfig, terms: AttentionTerms, **unused: Any) -> None:
        super().__init__(config=config)
        self.terms = terms
        if terms.sinks:
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            device = None if config.use_cpu_initialization else torch.cuda.current_device()
            self.sinks = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype, device=device))

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        *,
        packed_seq_params: PackedSequences,
        **unused: Any,
    ) -> torch.Tensor:
        """Map queries [T, heads, D], keys [T, kv heads, D] and values [T, kv heads, V] to [T, heads, V].

        Fused kernels know one size of a head: for them values are padded with zeros.
        """
        kernel = kernel_for(query.device.type, query.dtype, self.terms)
        sinks = (self.sinks,) if self.terms.sinks else ()
        query, key = self.rotated(query, key, packed_seq_params)
        if (keys := packed_seq_params.keys) is not None:
            key, value = gather_visible(key, value, keys)
        narrower = 0 if kernel is by_segments else query.size(-1) - value.size(-1)
        if not narrower:
            return kernel(query, key, value, packed_seq_params, self.terms, *sinks)
        padded = F.pad(value, (0, narrower))
        return kernel(query, key, padded, packed_seq_params, self.terms, *sinks)[..., : value.size(-1)]

    def rotated(
        self, query: torch.Tensor, key: torch.Tensor, sequences: PackedSequences
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and keys rotated for their positions."""
        return sequences.angles[self.terms.rope].rotate(query, key)
