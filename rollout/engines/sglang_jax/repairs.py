"""Fixes sglang-jax 0.0.2 on CPU; other releases are refused, because the fixes depend on this source.

1. `NativeAttention` registers itself as a pytree twice, which jax 0.8 rejects, so it cannot be imported.
2. Weights are padded to head size 128 for TPU kernels, but model and KV cache are not padded.
3. The output layer of a model with untied embeddings computes in bfloat16 for any model dtype, because its
   source passes no dtype. Log-probabilities of a float32 model were off by up to 0.018 before this fix and
   highest-precision matrix products; with both they agree within 1e-4.
4. Rotary embeddings round frequencies to the model's dtype; in bfloat16, angles of late positions are off by
   whole turns.

Call `register_repairs` before importing other modules of sglang-jax. The release's scheduler and sampler are
not fixed, because only `JaxModel` uses this.
"""

import copy
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp

from protocol.errors import EngineSettingsError

RELEASE = "0.0.2"


def register_repairs() -> None:
    """Fix the installed sglang-jax in this process, except for `repair_output`.

    Raises:
        EngineSettingsError: the installed release is not supported.
    """
    if (found := version("sglang-jax")) != RELEASE:
        raise EngineSettingsError(
            f"setting engine.python: it has sglang-jax {found}, the engine's repairs are for {RELEASE} alone"
        )
    _import_attention()
    _leave_heads_as_they_are()
    _turn_in_float32()


def repair_output(model: Any) -> None:
    """Let the output layer of a loaded model compute in the model's dtype."""
    if hasattr(model, "lm_head"):
        model.lm_head.dtype = model.dtype


def _import_attention() -> None:
    import jax.tree_util

    register = jax.tree_util.register_pytree_node_class
    jax.tree_util.register_pytree_node_class = lambda cls: cls
    try:
        import sgl_jax.srt.layers.attention.native_backend  # noqa: F401
    finally:
        jax.tree_util.register_pytree_node_class = register


def _leave_heads_as_they_are() -> None:
    from sgl_jax.srt.utils.weight_utils import WeightLoader

    create = WeightLoader.__init__

    def unpadded(loader: Any, *args: Any, **kwargs: Any) -> None:
        create(loader, *args, **kwargs)
        loader.head_dim, loader.head_dim_pad = loader.head_dim_original, 0

    WeightLoader.__init__ = unpadded


def _turn_in_float32() -> None:
    from sgl_jax.srt.layers.embeddings import RotaryEmbedding

    turn = RotaryEmbedding.__call__

    def turned(
        rotary: Any, positions: jax.Array, query: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        exact = copy.copy(rotary)
        exact.dtype = jnp.float32
        found = turn(exact, positions, query.astype(jnp.float32), key.astype(jnp.float32))
        return found[0].astype(query.dtype), found[1].astype(key.dtype)

    RotaryEmbedding.__call__ = turned
