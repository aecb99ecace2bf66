"""Defines the terms of a layer's attention, and which of them each attention backend computes."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

from trainer.config import TrainerConfig


@dataclass(frozen=True, slots=True)
class AttentionTerms:
    """Numbers of one layer. A kernel that cannot compute one of them refuses it."""

    scale: float | None = None
    """Factor of the scores; None: 1 / sqrt(D), D being the size of a head."""
    window: int = 0
    """Tokens that each one attends to, itself included; 0: all before it."""
    softcap: float = 0.0
    """Bound c of the scaled scores s, which become c tanh(s / c); 0: none."""
    rope: int = 0
    """Which of the model's rotary embeddings rotates queries and keys."""
    sinks: bool = False
    """Whether each head has a learnt score to which attention goes that no token gets."""

    @property
    def joins(self) -> bool:
        """Whether attention to some keys can be joined with attention to others.

        A window ends within some keys before a piece, at another one for each query; kernels with bounded
        scores do not say their log-sum-exp.
        """
        return not (self.window or self.softcap)

    @property
    def optional(self) -> frozenset[str]:
        """Its terms that not every kernel computes."""
        return frozenset(name for name in ("softcap", "sinks") if getattr(self, name))


PLAIN = AttentionTerms()


COMPUTED: dict[str, frozenset[str]] = {
    "torch": frozenset({"sinks"}),
    "flash_attn": frozenset({"softcap"}),
    "flash_attn_3": frozenset({"sinks"}),
    "transformer_engine": frozenset(),
}
"""Backend -> terms that its fused kernel computes, of those that not every kernel does."""
LIBRARIES = {
    "flash_attn": "flash_attn",
    "flash_attn_3": "flash_attn_interface",
    "transformer_engine": "transformer_engine",
}
"""Backends that are libraries -> the module that each needs."""
BELOW_TORCH = {"flash_attn_3": "FA3"}
"""Libraries that compute torch's own operators -> torch's names for them."""
TERMS = {"softcap": "bounded scores", "sinks": "attention sinks"}


def lacks_terms(backend: str, terms: AttentionTerms) -> str:
    """Return which terms the backend's fused kernel does not compute; empty if it computes all."""
    lacking = sorted(terms.optional - COMPUTED[backend])
    return f"it computes no {' and no '.join(TERMS[term] for term in lacking)}" if lacking else ""


def backend_refusals(config: TrainerConfig, terms: AttentionTerms, *, on_gpu: bool) -> Iterator[str]:
    """Yield reasons why `trainer.attention_backend` cannot compute a model's attention here.

    Args:
        config: the section.
        terms: the model's that not every kernel computes.
        on_gpu: whether the trainer is expected to compute on a GPU.
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
