"""Generates with the training model: a GPTModel with megatron-core's static KV cache, one step at a time.

megatron-core's own static engine runs a batch to its end, with one length for all rows. Here each row of the
cache, a slot, has its own length: requests start and end between two steps, and weights may change there.

Shapes: B slots in use, which are 0 .. B - 1 without a gap; N sequences, S tokens of the longest; V
vocabulary; D head size.
"""

import trainer.megatron.cpu  # noqa: F401 (before megatron-core)

# isort: split
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from protocol.errors import SettingsError
from trainer.config import ParallelConfig
from trainer.layers.attention.segmented import causal_attention
from trainer.layers.attention.softcapped import softcapped_attention
from trainer.layers.attention.terms import AttentionTerms
from trainer.megatron import cpu, parallel
from trainer.megatron.convert.reshard import stretch
from trainer.megatron.families.numbers import Architecture
from trainer.megatron.families.reading import read_architecture
from trainer.megatron.families.stages import export_plan
from trainer.megatron.layers.attention.rotary import Angles, Rotary
from trainer.megatron.layers.experts.replay import RouterRecorder
from trainer.megatron.layout import Layout, Place
from trainer.megatron.loading import load_checkpoint
from trainer.megatron.model import DTYPES, PackedModel, build_model, transformer_config
from trainer.megatron.sharing import buffers_of, parts_of

INITIAL_DEVIATION = 0.02
"""Standard deviation of the random weights of a model without a checkpoint."""


class SlotCache(StaticInferenceContext):
    """megatron-core's KV cache, [length, slots, kv heads, D] for each layer; keys are stored rotated."""

    def __init__(self, slots: int, length: int, architecture: Architecture, like: torch.Tensor) -> None:
        """Allocate all of it, in the dtype and on the device of `like`."""
        super().__init__(slots, length)
        self.materialize_only_last_token_logits = False
        shape = (length, slots, architecture.kv_heads, architecture.head_dim)
        self.key_value_memory_dict = {
            layer + 1: (like.new_empty(shape), like.new_empty(shape)) for layer in range(architecture.layers)
        }
        self.positions = torch.empty(0)
        """int64: positions of this pass's tokens, [S, 1] in a prefill, [1, B] when every slot gets one."""
        self.angles: tuple[Angles, ...] = ()
        """Angles of these positions, for each rotary embedding; [S, 1, 1, R] or [1, B, 1, R]."""
        self.first = 0
        """The first slot of a prefill."""
        self.width = 0
        """Tokens of the longest slot, including this pass's."""

    def set_positions(self, positions: torch.Tensor, rotaries: Sequence[Rotary]) -> None:
        """Begin a pass over tokens at these positions.

        longrope rotates all sequences as if they were as long as a slot, so that keys stay valid.
        """
        self.positions = positions
        longest = torch.full_like(positions.flatten(), self.max_sequence_length)
        self.angles = tuple(
            _shaped(rotary.angles(positions.flatten(), longest, self.tensors[0].dtype), positions)
            for rotary in rotaries
        )

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store this pass's keys and values; returns all that its queries attend to.

        Args:
            layer: from 1.
            key: [S, N, kv heads, D] in a prefill, [1, B, kv heads, D] when every slot gets one token.
            value: shaped as `key`.
        """
        keys, values = memory = self.key_value_memory_dict[layer]
        if self.is_decode_only():
            slots = torch.arange(key.size(1), device=key.device)
            for kept, new in zip(memory, (key, value), strict=True):
                kept[self.positions[0], slots] = new[0]
            return keys[: self.width, : len(slots)], values[: self.width, : len(slots)]
        for kept, new in zip(memory, (key, value), strict=True):
            part = kept[:, self.first : self.first + new.size(1)]
            part[: len(new)] = new
            part[len(new) :] = 0  # masked, but a NaN of an earlier request would pass the mask
        return key, value

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All keys and values."""
        return [kept for memory in self.key_value_memory_dict.values() for kept in memory]


class SlotAttention(SelfAttention):
    """Self-attention that rotates queries and keys for the positions of a `SlotCache` before storing them."""

    def _adjust_key_value_for_inference(
        self,
        inference_context: SlotCache,
        query: Any,
        key: Any,
        value: Any,
        rotary_pos_emb: Any,
        *unused: Any,
        **also_unused: Any,
    ) -> tuple[Any, ...]:
        query, key = inference_context.angles[self.core_attention.terms.rope].rotate(query, key)
        keys, values = inference_context.store(self.layer_number, key, value)
        return query, keys, values, None, self.attn_mask_type, None


class CausalAttention(MegatronModule):
    """Attention on torch's own kernels.

    Sequences are padded on the right, so causality alone excludes padding, without a mask.
    """

    def __init__(self, config: TransformerConfig, terms: AttentionTerms, **unused: Any) -> None:
        super().__init__(config=config)
        self.terms = terms

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **unused: Any
    ) -> torch.Tensor:
        """Map [S, B, heads, head_dim] to [S, B, heads * head_dim].

        Args:
            query: heads of this tensor rank.
            key: as `query`, with fewer heads if they are grouped.
            value: shaped as `key`.
            attention_mask: None for causal attention; with one query for each sequence a dictionary: window
                -> bool [B, 1, 1, keys], true where it attends.
        """
        terms = self.terms
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if attention_mask is None:
            out = causal_attention(q, k, v, terms.scale, terms.window, terms.softcap)
            return out.permute(2, 0, 1, 3).flatten(2)
        # The query heads of a group attend like tokens of a sequence, so that no key is copied for each of
        # them.
        grouped_queries = q.reshape(*k.shape[:2], -1, q.size(3))
        mask = attention_mask[terms.window]
        if terms.softcap:
            out = softcapped_attention(
                grouped_queries, k, v, scale=terms.scale, softcap=terms.softcap, mask=mask[:, None]
            )
        else:
            out = F.scaled_dot_product_attention(grouped_queries, k, v, attn_mask=mask, scale=terms.scale)
        return out.flatten(1)[None]


class OutputRows:
    """A selection of the rows whose logits are computed, so that prompts and padding are free.

    Set `index` (int64 [T] into the flattened [S, B]) before a forward pass; the model then returns logits [1,
    T, V / P].
    """

    def __init__(self, model: GPTModel) -> None:
        self.index: torch.Tensor | None = None
        model.output_layer.register_forward_pre_hook(self._select)

    def _select(
        self, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...] | None:
        if self.index is None:
            return None
        hidden = inputs[0]
        return hidden.flatten(0, 1).index_select(0, self.index).unsqueeze(1), *inputs[1:]


class SlotModel:
    """The whole model on one rank, alone or together with other users of megatron-core. Not thread-safe."""

    def __init__(
        self,
        model_dir: Path,
        *,
        dtype: str,
        slots: int,
        length: int,
        buffer_bytes: int = 0,
        records_experts: bool = False,
    ) -> None:
        """Load a checkpoint; a directory without one gives random weights.

        Args:
            model_dir: directory with config.json, and safetensors if it is a checkpoint.
            dtype: one of `DTYPES`.
            slots: sequences at a time.
            length: tokens of the longest sequence.
            buffer_bytes: limit of the KV cache: fewer slots are made if it is too small for all; 0 is no
                limit.
            records_experts: whether `experts_of_pass` tells which experts were chosen.

        Raises:
            SettingsError: model or attention are not supported, or the buffer holds no sequence.
            RuntimeError: there is no room for the parameters or the cache.
        """
        self.architecture = _generating(model_dir)
        self.slots = _slots(self.architecture, DTYPES[dtype].itemsize, length, slots, buffer_bytes)
        layout = Layout.of(ParallelConfig(), self.architecture.layers)
        self._plan = {plan.name: plan for plan in export_plan(self.architecture, layout)}
        self.shapes = {name: plan.shape for name, plan in self._plan.items()}
        """Checkpoint name -> shape."""
        cpu.install()
        position = parallel.initialize(ParallelConfig(), "auto", 0)
        self._closed = False
        try:
            self.module = _build(self.architecture, position, DTYPES[dtype])
            self._recorder = RouterRecorder(self.module) if records_experts else None
            self.parameters: dict[str, torch.Tensor] = dict(self.module.named_parameters())
            self._fill(model_dir, layout)
            self.cache = SlotCache(
                self.slots, length, self.architecture, next(iter(self.parameters.values()))
            )
        except BaseException:
            self.close()
            raise
        self._windows = {self.architecture.window_of(layer) for layer in range(self.architecture.layers)}
        self._rows = OutputRows(self.module)
        self._device = position.device

    def _fill(self, model_dir: Path, layout: Layout) -> None:
        if any(model_dir.glob("*.safetensors")):
            load_checkpoint(model_dir, self.architecture, self.parameters, layout, Place())
            return
        for parameter in self.parameters.values():
            parameter.normal_(0, INITIAL_DEVIATION)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy whole checkpoint tensors into the parameters, by the plan of the trainer's export."""
        for name, tensor in tensors:
            plan = self._plan[name]
            for piece in plan.pieces:
                held = self.parameters[plan.parameter]
                rows = stretch(held, plan.dim, piece.local_start, piece.length, piece.local_matrix)
                rows.copy_(stretch(tensor, plan.dim, piece.start, piece.length, piece.matrix))

    def parts(self) -> dict[str, torch.Tensor]:
        """Return checkpoint name -> the view of a parameter that is the tensor, see `matches_layout`."""
        return parts_of(self._plan.values(), self.parameters)

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the tensors other than parameters that it computes with."""
        return buffers_of(self.module)

    @torch.no_grad()
    def prefill(self, first: int, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """Fill the slots from `first` on, one for each sequence; returns logits [N, V] after its end."""
        lengths = torch.tensor([len(sequence) for sequence in sequences], device=self._device)
        longest = max(map(len, sequences))
        tokens = torch.tensor(
            [[*sequence, *[0] * (longest - len(sequence))] for sequence in sequences], device=self._device
        )
        self.cache.enable_prefill_mode()
        self.cache.first = first
        self.cache.set_positions(torch.arange(longest, device=self._device)[:, None], self.module.rotaries)
        self._rows.index = (lengths - 1) * len(sequences) + torch.arange(len(sequences), device=self._device)
        return self._logits(tokens, None)[0]

    @torch.no_grad()
    def decode(self, tokens: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """Append a token to each of the B slots in use; returns logits [B, V] after it.

        Args:
            tokens: one for each slot.
            lengths: tokens that each slot holds before.
        """
        positions = torch.tensor(lengths, device=self._device)
        self.cache.enable_decode_mode()
        self.cache.set_positions(positions[None], self.module.rotaries)
        self.cache.width = max(lengths) + 1
        self._rows.index = None
        places = torch.arange(self.cache.width, device=self._device)
        causal = places <= positions[:, None]
        masks = {
            window: causal & (places > positions[:, None] - window) if window else causal
            for window in self._windows
        }
        return self._logits(
            torch.tensor(tokens, device=self._device)[:, None],
            {window: mask[:, None, None] for window, mask in masks.items()},
        )[:, 0]

    def experts_of_pass(self, sequences: int) -> torch.Tensor | None:
        """Return the experts of the last pass, int64 [S, N, layers with experts, k] on the host.

        S tokens of each of N `sequences`, 1 of each slot in use if it was not a prefill. None if they are not
        recorded.
        """
        return None if self._recorder is None else self._recorder.take().unflatten(0, (-1, sequences))

    def move(self, source: int, target: int) -> None:
        """Copy slot `source` to slot `target`."""
        for kept in self.cache.tensors:
            kept[:, target] = kept[:, source]

    def close(self) -> None:
        """Leave the process groups. Idempotent."""
        if not self._closed:
            self._closed = True
            parallel.finalize()

    def _logits(self, tokens: torch.Tensor, masks: dict[int, torch.Tensor] | None) -> torch.Tensor:
        found: torch.Tensor = self.module(
            tokens, None, masks, inference_context=self.cache, runtime_gather_output=True
        )
        return found


def _generating(model_dir: Path) -> Architecture:
    """Read a model's architecture, unless the cache or the attention here lacks something of it."""
    architecture = read_architecture(model_dir)
    if missing := architecture.not_generated:
        raise SettingsError(
            f"{model_dir}: the engine megatron has no {missing}, which {architecture.model_type} needs: use "
            "engine.name 'sglang' or 'hf'"
        )
    return architecture


def _build(architecture: Architecture, position: parallel.Position, dtype: torch.dtype) -> PackedModel:
    config = transformer_config(architecture, position, dtype)
    model = build_model(
        architecture, config, position, attention=SlotAttention, core_attention=CausalAttention
    )
    return model.eval().requires_grad_(False)


def _shaped(angles: Angles, positions: torch.Tensor) -> Angles:
    """Return angles of flattened positions with the positions' shape in front."""
    cos, sin = (x.view(*positions.shape, 1, -1) for x in (angles.cos, angles.sin))
    return Angles(cos, sin, angles.interleaved)


def _slots(architecture: Architecture, itemsize: int, length: int, wanted: int, buffer_bytes: int) -> int:
    """Return how many sequences the KV cache holds."""
    needed = 2 * architecture.layers * architecture.kv_heads * architecture.head_dim * itemsize * length
    if 0 < buffer_bytes < needed:
        raise SettingsError(
            f"the KV cache of one sequence of {length} tokens takes {needed / 2**30:.3g} GiB, the buffer has "
            f"{buffer_bytes / 2**30:.3g}"
        )
    return min(wanted, buffer_bytes // needed) if buffer_bytes else wanted
