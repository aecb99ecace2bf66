"""Defines the terms of a layer's attention, and which terms each attention backend supports."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

from trainer.config import TrainerConfig


@dataclass(frozen=True, slots=True)
class AttentionTerms:
    """Attention parameters of one layer. A kernel without support for a parameter is refused."""

    scale: float | None = None
    """Factor of the scores; None: 1 / sqrt(D), with head size D."""
    window: int = 0
    """Attention window in tokens, including the token itself; 0: unlimited."""
    softcap: float = 0.0
    """Bound c of the scaled scores s, which become c tanh(s / c); 0: unbounded."""
    rope: int = 0
    """Index of the rotary embedding that rotates queries and keys."""
    sinks: bool = False
    """Whether each head has a learned sink: a score in the softmax without a value."""

    @property
    def joins(self) -> bool:
        """Whether attention over several sets of keys can be merged.

        With a window, each query sees a different part of the keys before a piece. Kernels with softcapped
        scores do not return their log-sum-exp.
        """
        return not (self.window or self.softcap)

    @property
    def optional(self) -> frozenset[str]:
        """Terms in use that not every kernel supports."""
        return frozenset(name for name in ("softcap", "sinks") if getattr(self, name))


PLAIN = AttentionTerms()


COMPUTED: dict[str, frozenset[str]] = {
    "torch": frozenset({"sinks"}),
    "flash_attn": frozenset({"softcap"}),
    "flash_attn_3": frozenset({"sinks"}),
    "transformer_engine": frozenset(),
}
"""Backend -> optional terms that its fused kernel supports."""
LIBRARIES = {
    "flash_attn": "flash_attn",
    "flash_attn_3": "flash_attn_interface",
    "transformer_engine": "transformer_engine",
}
"""Library backends -> module that each backend imports."""
TORCH_FLASH_IMPLS = {"flash_attn_3": "FA3"}
"""Libraries that replace torch's operators -> torch's names of the libraries."""
TERMS = {"softcap": "bounded scores", "sinks": "attention sinks"}


def lacks_terms(backend: str, terms: AttentionTerms) -> str:
    """Return which terms the backend's fused kernel does not support; empty if all are supported."""
    lacking = sorted(terms.optional - COMPUTED[backend])
    return f"it computes no {' and no '.join(TERMS[term] for term in lacking)}" if lacking else ""


def backend_refusals(config: TrainerConfig, terms: AttentionTerms, *, on_gpu: bool) -> Iterator[str]:
    """Yield reasons why `trainer.attention_backend` cannot compute a model's attention here.

    Args:
        config: section `[trainer]`.
        terms: optional terms of the model.
        on_gpu: whether the trainer is expected to run on a GPU.
    """
    name = config.attention_backend
    if name not in LIBRARIES:
        return
    if find_spec(LIBRARIES[name]) is None:
        yield f"the library with the module {LIBRARIES[name]} is not installed for this Python"
    if not on_gpu or config.dtype == "float32":
        device = "a GPU" if on_gpu else "a CPU"
        yield f"it computes on a GPU in 16 bits; the trainer is on {device}, in {config.dtype}"
    if lacking := lacks_terms(name, terms):
        yield lacking
