"""Selects the kernel for attention over packed sequences, and calls fused kernels.

Shapes: T tokens, K keys, D size of a head's query and key, V size of its value, mostly V = D.

`trainer.attention_backend` selects library kernels. No test runs flash-attn 2 or TransformerEngine here.
FlashAttention 3 replaces torch's own operators in this process, so comments about torch's kernel apply to
FlashAttention 3, too.
If a sequence has more keys than queries, its last query is aligned with its last key. The fused kernels count
a window's tokens without the query's own token, and -1 disables the window.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F

from protocol.errors import SettingsError
from trainer.config import AttentionBackend
from trainer.layers.attention.joined import joined_attention, seen_rows, spread_queries
from trainer.layers.attention.segmented import CausalPart, WholePart, segmented_attention
from trainer.layers.attention.sequences import PackedSequences
from trainer.layers.attention.terms import LIBRARIES, PLAIN, TORCH_FLASH_IMPLS, AttentionTerms, lacks_terms
from trainer.layers.attention.visible import KeyUse, SharedKeys


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sequences: PackedSequences,
    terms: AttentionTerms,
) -> torch.Tensor:
    """Compute causal attention with flash-attn."""
    from flash_attn import flash_attn_varlen_func

    out: torch.Tensor = flash_attn_varlen_func(
        q,
        seen_rows(k, sequences.keys),
        seen_rows(v, sequences.keys),
        sequences.offsets,
        sequences.key_offsets,
        sequences.longest,
        sequences.longest_keys,
        softmax_scale=terms.scale,
        causal=True,
        window_size=(terms.window - 1, 0),
        softcap=terms.softcap,
    )
    return out


def transformer_engine_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sequences: PackedSequences,
    terms: AttentionTerms,
) -> torch.Tensor:
    """Compute causal attention with TransformerEngine."""
    mask = "padding_causal" if sequences.keys is None else "padding_causal_bottom_right"
    out: torch.Tensor = _transformer_engine(q.size(1), k.size(1), q.size(2), terms, mask)(
        q,
        seen_rows(k, sequences.keys),
        seen_rows(v, sequences.keys),
        cu_seqlens_q=sequences.offsets,
        cu_seqlens_kv=sequences.key_offsets,
        max_seqlen_q=sequences.longest,
        max_seqlen_kv=sequences.longest_keys,
    )
    return out.view_as(q)


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sequences: PackedSequences,
    terms: AttentionTerms,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal attention with torch's varlen kernel. Older versions need no flag for grouped heads."""
    from torch.nn.attention.varlen import varlen_attn

    if sinks is not None or sequences.keys is not None:
        keys = sequences.keys
        shared = [_whole_part(call, terms) for call in keys.shared] if keys else []
        return joined_attention(q, k, v, keys, _causal_part(sequences, terms), shared, sinks)
    options: dict[str, Any] = {} if terms.scale is None else {"scale": terms.scale}
    if q.size(1) != k.size(1) and _varlen_asks_for_groups():
        options["enable_gqa"] = True
    output = varlen_attn(
        q,
        k,
        v,
        sequences.offsets,
        sequences.key_offsets,
        sequences.longest,
        sequences.longest_keys,
        window_size=(terms.window - 1, 0),
        **options,
    )
    return cast(torch.Tensor, output)  # a tuple only if the log-sum-exp is requested


@dataclass(frozen=True, slots=True)
class VarlenPart:
    """Attention within sequences by torch's varlen kernel; implements `joined.Part`."""

    offsets: torch.Tensor
    """int32 [S + 1], on the device: start of each sequence's queries."""
    key_offsets: torch.Tensor
    longest: int
    longest_keys: int
    causal: bool
    scale: float | None
    window: int = 0

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute output and log-sum-exp."""
        causal, scale, window = self._options
        out, total, _ = torch.ops.torch_attn._varlen_attn(q, k, v, *self._places, causal, scale, window)
        return out, total

    def backward(
        self,
        out_grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        total: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute gradients."""
        causal, scale, window = self._options
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.torch_attn._varlen_attn_backward(
            out_grad, q, k, v, out, total, *self._places, causal, no_dropout, scale, window
        )
        return found

    @property
    def _places(self) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        return self.offsets, self.key_offsets, self.longest, self.longest_keys

    @property
    def _options(self) -> tuple[bool, float | None, list[int]]:
        if not self.causal:
            return False, self.scale, [-1, -1]
        return not self.window, self.scale, [self.window - 1, 0]


def _causal_part(sequences: PackedSequences, terms: AttentionTerms) -> VarlenPart:
    """Return causal attention of each sequence to its own keys."""
    offsets = sequences.offsets, sequences.key_offsets
    return VarlenPart(*offsets, sequences.longest, sequences.longest_keys, True, terms.scale, terms.window)


def _whole_part(call: SharedKeys, terms: AttentionTerms) -> VarlenPart:
    """Return non-causal attention of each query to all keys of its sequence."""
    longest, longest_keys = map(max, zip(*call.sizes, strict=True))
    return VarlenPart(call.query_offsets, call.key_offsets, longest, longest_keys, False, terms.scale)


@functools.cache
def _varlen_asks_for_groups() -> bool:
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


@functools.cache
def _transformer_engine(heads: int, kv_heads: int, head_dim: int, terms: AttentionTerms, mask: str) -> Any:
    from transformer_engine.pytorch import DotProductAttention

    return DotProductAttention(
        heads,
        head_dim,
        num_gqa_groups=kv_heads,
        attn_mask_type=mask,
        qkv_format="thd",
        softmax_scale=terms.scale,
        window_size=(terms.window - 1, 0),
    )


Kernel = Callable[..., torch.Tensor]
"""(q [T, heads, D], k [T, kv heads, D], v like k, sequences, terms) -> [T, heads, D]; causal within each
sequence. `by_segments` also accepts v [T, kv heads, V], and returns [T, heads, V]. Kernels with the term
`sinks` accept sinks [heads] as the last argument. With context parallelism, k and v are gathered from all
context ranks. Then, and if samples share tokens, `sequences.keys` specifies the visible keys."""
QUERY_COST = 2.5
"""Cost of merging a query's attention over two sets of keys, in units of copying one key.

On a GPU both are bound by memory bandwidth. Merging reads a query and writes its output once more in both
passes, about 14 times the query's bytes. A copied key has gradients for every query head, about 5.5 times.
"""


def by_segments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sequences: PackedSequences,
    terms: AttentionTerms,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal attention by segments with torch's attention: on any device, and as the reference."""
    keys, segments, numbers = sequences.keys, sequences.segments, (terms.scale, terms.window, terms.softcap)
    if keys is not None and keys.shared:
        narrower = q.size(-1) - v.size(-1)
        shared = [WholePart(call.sizes, terms.scale) for call in keys.shared]
        padded = F.pad(v, (0, narrower)) if narrower else v
        out = joined_attention(q, k, padded, keys, CausalPart(segments, terms.scale), shared, sinks)
        return out[..., : v.size(-1)] if narrower else out
    if keys is not None:
        q = spread_queries(q, keys)
    out = segmented_attention(q, seen_rows(k, keys), seen_rows(v, keys), segments, *numbers, sinks)
    return out if keys is None else out.index_select(0, keys.queries)


FUSED: dict[str, Kernel] = {
    "torch": varlen_attention,
    "flash_attn": flash_attention,
    "flash_attn_3": varlen_attention,
    "transformer_engine": transformer_engine_attention,
}
"""`trainer.attention_backend` -> fused kernel. The backend `segments` has no fused kernel."""
HOPPER = 9
"""Compute capability that FlashAttention 3 requires."""
_backend = "torch"
"""Attention backend of this process, see `choose_backend`."""


def choose_backend(name: AttentionBackend) -> None:
    """Set the attention backend for all models of this process.

    Raises:
        SettingsError: torch cannot use the chosen library.
    """
    global _backend
    if torch.nn.attention.current_flash_attention_impl():
        torch.nn.attention.restore_flash_attention_impl()
    if name in TORCH_FLASH_IMPLS:
        _activate_flash_impl(name)
    _backend = "torch" if name == "auto" else name
    kernel_for.cache_clear()


def _activate_flash_impl(name: str) -> None:
    """Register a library as the implementation of torch's operators."""
    why = ""
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != HOPPER:
        why = f"it is for GPUs of compute capability {HOPPER}, this is {torch.cuda.get_device_name()}"
    else:
        try:
            torch.nn.attention.activate_flash_attention_impl(TORCH_FLASH_IMPLS[name])
        except (ImportError, RuntimeError) as error:
            why = str(error)
    if why:
        raise SettingsError(f"setting trainer.attention_backend: {name}: {why}; use torch")


@functools.cache
def kernel_for(device_type: str, dtype: torch.dtype, terms: AttentionTerms = PLAIN) -> Kernel:
    """Return the kernel of the chosen backend, or `by_segments` if torch's fused kernel does not apply.

    Raises:
        SettingsError: the chosen library, flash_attn or transformer_engine, cannot compute these terms.
    """
    lacking = "" if _backend == "segments" else lacks_terms(_backend, terms)
    fits = device_type == "cuda" and dtype in (torch.bfloat16, torch.float16) and not lacking
    if _backend in LIBRARIES and not fits:
        why = lacking or f"it computes on CUDA in 16 bits, and this is {device_type}, {dtype}"
        raise SettingsError(f"setting trainer.attention_backend: {_backend}: {why}; use torch")
    return FUSED[_backend] if fits and _backend in FUSED else by_segments


def key_uses(device_type: str, dtype: torch.dtype, terms: Iterable[AttentionTerms]) -> list[KeyUse]:
    """Return the key use of layers that can attend to shared keys separately, then of the other layers.

    With one kind of layer, the result has one entry.
    """
    costs = {one: _query_cost(device_type, dtype, one) for one in terms}
    joining = {cost for cost in costs.values() if cost is not None}
    windows = [one.window for one, cost in costs.items() if cost is None]
    uses = [KeyUse(query_cost=max(joining))] if joining else []
    return [*uses, KeyUse(window=max(windows) if all(windows) else 0)] if windows else uses


def _query_cost(device_type: str, dtype: torch.dtype, terms: AttentionTerms) -> float | None:
    """Return the cost per query of attending to shared keys separately; None if the kernel cannot."""
    kernel = kernel_for(device_type, dtype, terms)
    if terms.joins and kernel is varlen_attention:
        return QUERY_COST
    # segments have as many queries as keys, so copied keys also add queries
    return 0.0 if terms.joins and kernel is by_segments and device_type == "cpu" else None


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sequences: PackedSequences,
    terms: AttentionTerms,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Map queries [T, heads, D], keys [K, kv heads, D] and values [K, kv heads, V] to [T, heads, V].

    Fused kernels support one head size, so values are padded with zeros to D.

    Args:
        query: queries of the tokens.
        key: keys of the tokens or, with context parallelism, of all context ranks; `sequences.keys` specifies
            the visible keys.
        value: values of the same tokens as `key`.
        sequences: layout of the micro-batch.
        terms: attention terms of the layer.
        sinks: [heads], if the terms include sinks.
    """
    kernel = kernel_for(query.device.type, query.dtype, terms)
    more = () if sinks is None else (sinks,)
    narrower = 0 if kernel is by_segments else query.size(-1) - value.size(-1)
    if not narrower:
        return kernel(query, key, value, sequences, terms, *more)
    padded = F.pad(value, (0, narrower))
    return kernel(query, key, padded, sequences, terms, *more)[..., : value.size(-1)]
