"""Runs a sglang-jax model in its interpreter: prefill, decode and weight updates.

Shapes: N sequences, T tokens and K keys over all sequences, V vocabulary. N, T and K are rounded up to powers
of two to limit the number of compiled programs.
"""

import copy
import json
import mmap
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from protocol.weights.digests import digest
from rollout.engines.sglang_jax.repairs import register_repairs, repair_output

register_repairs()

from sgl_jax.srt.configs.load_config import LoadConfig, LoadFormat  # noqa: E402
from sgl_jax.srt.configs.model_config import ModelConfig  # noqa: E402
from sgl_jax.srt.layers.attention.native_backend import NativeAttention  # noqa: E402
from sgl_jax.srt.layers.logits_processor import LogitsMetadata  # noqa: E402
from sgl_jax.srt.mem_cache.memory_pool import MHATokenToKVPool  # noqa: E402
from sgl_jax.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode  # noqa: E402
from sgl_jax.srt.model_loader.loader import get_model_loader  # noqa: E402
from sgl_jax.srt.utils.weight_utils import WeightLoader  # noqa: E402

MAPPINGS = {
    "Qwen2ForCausalLM": "_create_qwen2_weight_mappings",
    "Qwen3ForCausalLM": "_create_qwen3_weight_mappings",
}
"""Model class -> its method that maps checkpoint tensors to parameters."""
MIN_TOKENS = 64
MIN_KEYS = 256
Integers = NDArray[np.int32]


class JaxModel:
    """Model with a slotted KV cache; arrays are exchanged through memory shared with the engine.

    The cache has one place per token. Place 0 stays empty, because attention uses it for padding.
    """

    def __init__(self, descriptor: int) -> None:
        """Create an object without a model; `descriptor` is the file that `share` maps."""
        self._descriptor = descriptor

    def load(
        self, model_dir: str, random: bool, dtype: str, overrides: dict[str, Any], slots: int, length: int
    ) -> list[tuple[str, list[int]]]:
        """Load a model.

        Args:
            random: use random weights, because the directory has none.
            dtype: dtype of parameters and KV cache.
            overrides: config fields that this interpreter's transformers would not find.
            slots: number of sequences in the KV cache.
            length: maximum length of a sequence, tokens.

        Returns: (name, shape) of each checkpoint tensor.
        """
        jax.config.update("jax_default_matmul_precision", "highest")
        config = ModelConfig(
            model_dir, trust_remote_code=False, dtype=dtype, model_override_args=json.dumps(overrides)
        )
        self._mesh = jax.sharding.Mesh(
            np.array(jax.devices()[:1]).reshape(1, 1, 1), ("data", "tensor", "expert")
        )
        source = LoadConfig(load_format=LoadFormat.DUMMY if random else LoadFormat.JAX)
        with jax.set_mesh(self._mesh):
            config.configure_for_tensor_parallel(1)
            loader = get_model_loader(source, rngs=nnx.Rngs(0), mesh=self._mesh)
            self._model = loader.load_model(model_config=config)
            self._pool = MHATokenToKVPool(
                size=slots * length,
                page_size=1,
                dtype=config.dtype,
                head_num=config.num_key_value_heads,
                head_dim=config.head_dim,
                layer_num=config.num_hidden_layers,
                mesh=self._mesh,
            )
        repair_output(self._model)
        self._kv = self._pool.kv_buffer
        self._first = [1 + slot * length for slot in range(slots)]  # place of each slot's first token
        self._dtype, self._vocab = jnp.dtype(config.dtype), config.vocab_size
        self._loader = WeightLoader(self._model, config, self._mesh, config.dtype)
        self._mappings = getattr(self._model, MAPPINGS[type(self._model).__name__])()
        definition, state = nnx.split(self._model)
        self._leaves, self._structure = jax.tree_util.tree_flatten(state)
        attention = NativeAttention(config.num_attention_heads, config.num_key_value_heads)
        self._compute = self._compiled(definition, attention)
        self._mappings = {name: mapping for name, mapping in self._mappings.items() if self._has(mapping)}
        self._hold_once()
        return [(name, list(self._tensor(name).shape)) for name in self._mappings]

    def share(self, names: list[str], nbytes: int, places: list[int], logits_at: int) -> None:
        """Map the memory allocated by the engine.

        Args:
            names: tensors that versions change; with adapters, a subset of the tensors returned by `load`.
            places: byte offset of each tensor.
            logits_at: byte offset of the logits, float32 [N, V].
        """
        self._mappings = {name: self._mappings[name] for name in names}
        changed = {id(self._parameter(mapping).value) for mapping in self._mappings.values()}
        self._replaced = {index for index, leaf in enumerate(self._leaves) if id(leaf) in changed}
        """Indices of the leaves that versions replace."""
        memory, shapes = mmap.mmap(self._descriptor, nbytes), [self._tensor(name).shape for name in names]
        self._staged = {
            name: np.frombuffer(memory, self._dtype, int(np.prod(shape)), place).reshape(shape)
            for name, shape, place in zip(names, shapes, places, strict=True)
        }
        logits = np.frombuffer(memory, np.float32, len(self._first) * self._vocab, logits_at)
        self._logits = logits.reshape(-1, self._vocab)

    def prefill(self, first: int, sequences: Sequence[Sequence[int]]) -> None:
        """Fill slots from `first` on, one per sequence, and write logits [N, V] after the last tokens."""
        lengths = [len(sequence) for sequence in sequences]
        places = [self._places(first + i, length) for i, length in enumerate(lengths)]
        positions = [np.arange(length) for length in lengths]
        self._run(np.concatenate(sequences), positions, places, places, lengths, is_prompt=True)

    def decode(self, tokens: Sequence[int], lengths: Sequence[int]) -> None:
        """Append a token to each slot in use and write logits [N, V] after it.

        Args:
            tokens: token of each slot.
            lengths: number of tokens in each slot before the call.
        """
        ends = [length + 1 for length in lengths]
        keys = [self._places(slot, end) for slot, end in enumerate(ends)]
        last = [places[-1:] for places in keys]
        positions = [np.array([length]) for length in lengths]
        self._run(np.array(tokens), positions, last, keys, ends, is_prompt=False)

    def move(self, source: int, target: int) -> None:
        """Move the sequence in slot `source` to slot `target`; `source` becomes free."""
        self._first[source], self._first[target] = self._first[target], self._first[source]

    def replace(self) -> None:
        """Switch to the tensors in shared memory; on an error the old tensors remain."""
        params = jax.tree_util.tree_unflatten(self._structure, self._leaves)
        with jax.set_mesh(self._mesh):
            for name, mapping in self._mappings.items():
                copied = jnp.array(self._staged[name], copy=True)  # the next version is staged in this memory
                self._loader._process_and_assign_weight(params, name, copied, mapping)
        leaves, structure = jax.tree_util.tree_flatten(params)
        assert structure == self._structure
        self._leaves = jax.block_until_ready(leaves)

    def release(self) -> None:
        """Drop the tensors of versions and the KV cache. Idempotent."""
        self._leaves = [
            _like(leaf) if index in self._replaced else leaf for index, leaf in enumerate(self._leaves)
        ]
        self._kv, self._pool.kv_buffer = [], []

    def restore(self) -> None:
        """Reallocate the KV cache; the next `replace` provides the tensors. Idempotent."""
        if not self._kv:
            self._kv = [jnp.zeros(kv.shape, kv.dtype, device=kv.sharding) for kv in self._kv_like]

    def digests(self) -> list[int]:
        """Return the digests of the live tensors that versions change, in the order of `share`."""
        return [digest(self._tensor(name).tobytes()) for name in self._mappings]

    def _run(
        self,
        tokens: NDArray[np.int64],
        positions: Sequence[NDArray[np.int64]],
        written: Sequence[Integers],
        read: Sequence[Integers],
        lengths: Sequence[int],
        *,
        is_prompt: bool,
    ) -> None:
        """Compute tokens [T] at their positions, writing and reading keys and values at the given places."""
        count = len(lengths)
        rows = _rounded(count, 1)
        size = _rounded(len(tokens), MIN_TOKENS) if is_prompt else rows
        with jax.set_mesh(self._mesh):
            logits, self._kv = self._compute(
                self._leaves,
                self._kv,
                _padded([tokens], size, 0),
                _padded(positions, size, 0),
                _padded(written, size, -1),
                _padded(read, _rounded(sum(lengths), MIN_KEYS), 0),
                _padded([np.array(lengths)], rows, 0),
                is_prompt=is_prompt,
            )
        self._logits[:count] = np.asarray(logits)[:count]

    def _compiled(self, definition: Any, attention: Any) -> Callable[..., tuple[jax.Array, list[jax.Array]]]:
        pool, structure = self._pool, self._structure

        @partial(jax.jit, static_argnames="is_prompt", donate_argnums=1)
        def compute(
            leaves: list[jax.Array],
            kv: list[jax.Array],
            tokens: jax.Array,
            positions: jax.Array,
            written: jax.Array,
            read: jax.Array,
            lengths: jax.Array,
            *,
            is_prompt: bool,
        ) -> tuple[jax.Array, list[jax.Array]]:
            model = nnx.merge(definition, jax.tree_util.tree_unflatten(structure, leaves))
            cache = copy.copy(pool)
            cache.kv_buffer = list(kv)
            mode = ForwardMode.EXTEND if is_prompt else ForwardMode.DECODE
            batch = ForwardBatch(
                bid=0,
                forward_mode=mode,
                batch_size=len(lengths),
                input_ids=tokens,
                req_pool_indices=None,
                seq_lens=lengths,
                out_cache_loc=written,
                positions=positions,
                attn_backend=attention,
                cache_loc=read,
                extend_prefix_lens=jnp.zeros_like(lengths),
                extend_seq_lens=lengths,
            )
            output, filled, _ = model(batch, cache, LogitsMetadata(mode, extend_seq_lens=lengths))
            return output.next_token_logits.astype(jnp.float32), filled

        return compute

    def _hold_once(self) -> None:
        """Let only the leaves own arrays: `replace` and `release` do not update the model's references."""
        self._kv_like = [_like(kv) for kv in self._kv]
        state = jax.tree_util.tree_unflatten(self._structure, [_like(leaf) for leaf in self._leaves])
        nnx.update(self._model, state)

    def _places(self, slot: int, length: int) -> Integers:
        return np.arange(self._first[slot], self._first[slot] + length, dtype=np.int32)

    def _has(self, mapping: Any) -> bool:
        """Return whether the model has the parameter; some mappings name a missing bias."""
        try:
            return self._parameter(mapping) is not None
        except ValueError:
            return False

    def _tensor(self, name: str) -> NDArray[Any]:
        """Return a live tensor in checkpoint layout."""
        mapping = self._mappings[name]
        found = np.asarray(self._parameter(mapping).value)
        return found.T if mapping.transpose and not name.endswith(".bias") else found

    def _parameter(self, mapping: Any) -> Any:
        live = jax.tree_util.tree_unflatten(self._structure, self._leaves)
        return self._loader._get_param(live, mapping.target_path)


def _like(array: jax.Array) -> jax.ShapeDtypeStruct:
    """Return shape, dtype and sharding of an array without its memory."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _rounded(count: int, minimum: int) -> int:
    """Return the smallest power of two of at least `count` and `minimum`; `minimum` is a power of two."""
    return max(minimum, 1 << (count - 1).bit_length())


def _padded(parts: Sequence[NDArray[Any]], size: int, filler: int) -> Integers:
    """Concatenate arrays and pad to `size`."""
    found = np.full(size, filler, np.int32)
    joined = np.concatenate(parts)
    found[: len(joined)] = joined
    return found
