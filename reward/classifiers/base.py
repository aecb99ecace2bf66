"""Defines what computes the logit of texts for the verifier `reward_model`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ClassifierConfig:
    """Options of `reward_model` for loading a classifier."""

    directory: Path
    """Directory of model and tokenizer."""
    device: str
    """cpu, cuda or cuda:N."""
    dtype: str
    max_length: int
    """Tokens of a text, at most; 0: no limit is known."""
    batch_size: int
    """Texts in one pass, at most."""
    threads: int
    memory_fraction: float
    """Share of a GPU's memory that an engine may take."""
    kv_cache_mb: int
    """KV cache of an engine on a CPU, MiB."""
    tensor_parallel_size: int = 1
    """Devices from `device` on that share every layer, in an engine."""
    python: str = ""
    """Interpreter of an engine that has one of its own; empty: this one."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of that engine's processes."""


class Classifier(Protocol):
    """A loaded sequence classifier with one label."""

    def logits(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """Return the logit of each text, at least one, given as tokens, at least one.

        Each is the one of that text alone, read at its last token that is not the padding of the model's
        configuration. May raise anything.
        """
