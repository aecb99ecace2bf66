"""Recomputes log-probabilities of recorded tokens with Hugging Face's model under a version's weights.

Each row is a separate pass, without padding, cache or packing, with eager attention. The distributions of its
positions are computed `CHUNK` at a time.

Shapes: T own tokens of a row, V tokens of the vocabulary, G powers, C positions of a chunk.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from protocol.device.checkpoint_shapes import checkpoint_shapes
from protocol.device.checkpoint_views import checkpoint_views, model_tensors
from protocol.device.hf_models import MODEL_BUILDING, apply_config, code_trust
from protocol.errors import SettingsError
from protocol.host.machine import memory_available
from protocol.rollout_view import RowView
from protocol.weights.lora import NO_ADAPTERS, LoraConfig
from rollout.engines.base import KvPolicy
from services.audit.versions import merged_version
from services.settings.sections import Settings

log = logging.getLogger("tether.audit")

POWERS = (0.5, 0.75, 0.9, 1.1, 1.35, 2.0)
"""Alternatives to the policy p, proportional to p ** power: other temperatures, [G]."""
COMPARISON_DTYPES = {"float32": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Engine's dtype -> dtype compared with float32 to measure rounding."""
CHUNK = 64
"""Number of positions whose distributions over the vocabulary are held at a time, C."""
MEMORY_SHARE = 0.25
"""Share of the host's free memory for the models of an audit."""
MODEL_BYTES = 12
"""Bytes per parameter of both models: float32, and the comparison dtype, at most float64."""
ADAPTER_MEMORY_FACTOR = 3
"""Memory factor for adapters: initial tensors are kept, and a merged version is built from them."""
PARAMETER_S = 8e-9
"""Seconds of processor time per parameter to load both models; 6.3e-9 was measured with 135 M."""
MIN_PASS_TOKENS = 256
"""Minimum tokens per pass that the operations must allow; otherwise too few rows justify the models."""
QUANTISING_ARGUMENTS = frozenset({"quantization", "kv_cache_dtype"})
"""Engine arguments that cause more rounding than the dtype."""
FLOAT64_TABLES = 3
"""Number of float64 tables [C, V] held at a time."""


@dataclass(frozen=True, slots=True)
class RowScores:
    """Scores of a row's own tokens under one version."""

    logprobs: NDArray[np.float64]
    """[T] log-probability of each token given the previous ones, nats."""
    tempered: NDArray[np.float64]
    """[T, G] log of p_power(token) / p(token): logarithm of an e-value if the token was drawn from p."""


class Recomputer:
    """Model on the CPU whose weights are replaced by a version's."""

    def __init__(
        self,
        model_dir: Path,
        dtype: torch.dtype = torch.float32,
        lora: LoraConfig = NO_ADAPTERS,
        max_row_bytes: float = math.inf,
        operations: float = math.inf,
    ) -> None:
        """Load the initial model of a run, whose versions may be adapters.

        Args:
            model_dir: directory of the initial model.
            dtype: dtype of the computation.
            lora: adapters of the run.
            max_row_bytes: maximum bytes of a row's pass, see `fits`.
            operations: maximum floating-point operations of a row's pass.

        Raises:
            SettingsError: transformers cannot load the model.
        """
        try:
            with MODEL_BUILDING:
                model: Any = AutoModelForCausalLM.from_pretrained(
                    model_dir,
                    dtype=torch.float32,  # another dtype would be the default of all threads during the load
                    local_files_only=True,
                    attn_implementation="eager",
                    experts_implementation="eager",
                    **code_trust(),
                )
        except (OSError, ValueError, KeyError) as error:
            raise SettingsError(f"{model_dir}: transformers cannot load it: {error}") from error
        apply_config(model)
        for parameter in model.parameters():  # not buffers: rotary tables stay as exact as in engines
            parameter.data = parameter.data.to(dtype)
        self._model: Any = model.eval().requires_grad_(False)
        self._views = checkpoint_views(self._model, model_tensors(self._model))
        self._lora, self._max_row_bytes, self._itemsize = lora, max_row_bytes, max(4, dtype.itemsize)
        self._max_tokens = operations / (2 * sum(one.numel() for one in model.parameters()))
        """Maximum number of tokens per pass."""
        self._base = {name: view.clone() for name, view in self._views.items()} if lora.rank else {}

    @torch.no_grad()
    def serve(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load a version's tensors, by their Hugging Face names.

        Raises:
            SettingsError: the version lacks a tensor of the model, or its shape differs.
        """
        tensors = merged_version(self._base, tensors, self._lora)
        for name, view in self._views.items():
            if name not in tensors or tensors[name].shape != view.shape:
                raise SettingsError(f"the version has no tensor {name} of shape {tuple(view.shape)}")
        for name, view in self._views.items():
            view.copy_(tensors[name])

    def fits(self, prompt: NDArray[np.int32], row: RowView) -> bool:
        """Return whether a row's pass stays within its limits of memory and time."""
        length = len(prompt) + len(row.context) + len(row.tokens)
        config = self._model.config.get_text_config()
        heads = getattr(config, "num_attention_heads", 0)  # absent: no attention
        scores = 2 * heads * length * length * self._itemsize  # before and after the softmax
        return bool(
            length <= self._max_tokens
            and scores + CHUNK * config.vocab_size * 8 * FLOAT64_TABLES <= self._max_row_bytes
        )

    @torch.no_grad()
    def score(
        self, prompt: NDArray[np.int32], row: RowView, temperature: float, *, powers: bool = True
    ) -> RowScores:
        """Return the scores of a row's own tokens at a temperature; 0 for the very first token."""
        tokens = np.concatenate([prompt, row.context, row.tokens]).astype(np.int64)
        first = len(tokens) - len(row.tokens)
        ids = torch.from_numpy(tokens)
        hidden = self._model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state
        columns = np.zeros((len(row.tokens), 1 + len(POWERS) * powers))
        for begin in range(max(first, 1), len(tokens), CHUNK):
            targets = ids[begin : begin + CHUNK, None]
            logits = self._logits(hidden[:, begin - 1 : begin - 1 + len(targets)])
            table = torch.log_softmax(logits.double() / temperature, -1)
            chosen = table.gather(-1, targets)[:, 0]
            tempered = [p * chosen - torch.logsumexp(p * table, -1) - chosen for p in POWERS if powers]
            offset = begin - first
            columns[offset : offset + len(targets)] = torch.stack([chosen, *tempered], -1).numpy()
        return RowScores(columns[:, 0], columns[:, 1:])

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [C, V] of hidden states [1, C, H].

        Uses the model's own output code, which may scale or cap logits: a hook replaces the decoder's states
        in a pass of one token.
        """

        def replace_hidden(module: Any, inputs: Any, output: Any) -> Any:
            output.last_hidden_state = hidden
            return output

        hook = self._model.base_model.register_forward_hook(replace_hidden)
        try:
            logits: torch.Tensor = self._model(
                input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=False
            ).logits[0]
        finally:
            hook.remove()
        return logits


@dataclass(frozen=True, slots=True)
class RecomputeResources:
    """Resources for the models that recompute log-probabilities."""

    max_row_bytes: float
    """Maximum bytes of a row's pass."""
    load_s: float
    """Approximate processor time to load the models, seconds."""


def recompute_resources(settings: Settings, operations: float = math.inf) -> RecomputeResources | None:
    """Return the resources for recomputing log-probabilities.

    None if the host lacks memory for the models, if `operations` allow only short passes, if engines compute
    with quantised numbers, or if tokens depend on older versions' KV (`engine.kv` = keep).

    Raises:
        EngineError: the model's files cannot be read.
    """
    engine = settings.engine
    if engine.kv is KvPolicy.KEEP or QUANTISING_ARGUMENTS & engine.arguments.keys():
        return None
    free = memory_available()
    parameters = sum(math.prod(shape) for shape in checkpoint_shapes(settings.model_dir).values())
    version_bytes = getattr(torch, engine.dtype).itemsize  # a version is a copy; adapters are small
    needed = parameters * (
        MODEL_BYTES * ADAPTER_MEMORY_FACTOR if settings.lora.rank else MODEL_BYTES + version_bytes
    )
    max_row_bytes = MEMORY_SHARE * free - needed
    if max_row_bytes < 0 or operations < 2 * parameters * MIN_PASS_TOKENS:
        log.warning("audit.no_recompute parameters=%d free_mb=%d", parameters, free >> 20)
        return None
    return RecomputeResources(max_row_bytes, PARAMETER_S * parameters)


def recomputers(settings: Settings, operations: float = math.inf) -> tuple[Recomputer, Recomputer] | None:
    """Load the models that recompute log-probabilities; None without the resources.

    Args:
        settings: settings of the run.
        operations: maximum floating-point operations of a row's pass.

    Raises:
        SettingsError: the model cannot be loaded.
        EngineError: the model's files cannot be read.
    """
    if (resources := recompute_resources(settings, operations)) is None:
        return None
    dtypes = torch.float32, COMPARISON_DTYPES[settings.engine.dtype]
    first, second = (
        Recomputer(settings.model_dir, dtype, settings.lora, resources.max_row_bytes, operations)
        for dtype in dtypes
    )
    return first, second
