"""Says which terms and libraries the values of `trainer.attention_backend` need, and imports no library."""

from collections.abc import Iterator
from importlib.util import find_spec

from trainer.config import TrainerConfig
from trainer.layers.attention.terms import AttentionTerms

COMPUTED: dict[str, frozenset[str]] = {
    "torch": frozenset({"sinks"}),
    "flash_attn": frozenset({"softcap"}),
    "transformer_engine": frozenset(),
}
"""Backend -> terms that its fused kernel computes, of those that not every kernel does."""
LIBRARIES = ("flash_attn", "transformer_engine")
"""Backends that are libraries, of the same name."""
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
    if find_spec(name) is None:
        yield f"the library {name} is not installed for this Python"
    if not on_gpu or config.dtype == "float32":
        device = "a GPU" if on_gpu else "a CPU"
        yield f"it computes on a GPU in 16 bits; the trainer is on {device}, in {config.dtype}"
    if lacking := lacks_terms(name, terms):
        yield lacking
