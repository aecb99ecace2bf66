"""Defines the options of the verifier `reward_model`, and what computes the logits of texts for it."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, Protocol

from annotated_types import Interval

from protocol.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `reward_model`."""

    path: str
    """Directory of the model and its tokenizer, or the name of a model on the Hugging Face hub."""
    revision: str = ""
    """Branch, tag or commit on the hub. Empty: main. A commit is the same at every start."""
    device: str = "cpu"
    """Where it computes: cpu, cuda or cuda:N."""
    dtype: Literal["bfloat16", "float16", "float32"] = "float32"
    """Data type of its parameters."""
    max_length: Annotated[int, Interval(ge=0)] = 0
    """Tokens of prompt and response together; more are cut off at the end. 0: as many as the model has
    positions."""
    batch_size: Annotated[int, Interval(ge=1)] = 16
    """Responses of a group in one pass, at most."""
    text: Literal["auto", "chat", "plain"] = "auto"
    """What it reads: the tokenizer's chat template with the prompt as the user's turn and the response as
    the assistant's (chat), prompt and response as one text (plain), or chat if there is a template (auto)."""
    separator: str = ""
    """plain: text between prompt and response."""
    sigmoid: bool = False
    """Score the sigmoid of the logit, between 0 and 1, instead of the logit."""
    threads: Annotated[int, Interval(ge=1)] = 1
    """Threads of a worker on the CPU."""
    engine: Literal["transformers", "vllm", "sglang"] = "transformers"
    """Library that computes: in the worker process or, sglang, in its children."""
    memory_fraction: Annotated[float, Interval(gt=0, le=1)] = 0.3
    """An engine on a GPU: share of its memory for weights and KV cache."""
    kv_cache_mb: Annotated[int, Interval(ge=1, le=10**9)] = 1024
    """An engine on a CPU: KV cache, MiB."""
    tensor_parallel_size: Annotated[int, Interval(ge=1, le=4096)] = 1
    """Devices that share the model in an engine, from `device` on, a process on each."""
    python: str = ""
    """sglang: interpreter that has SGLang. Empty: the reward worker's."""
    environment: dict[str, str] = field(default_factory=dict)
    """sglang: variables of its processes."""


class Classifier(Protocol):
    """A loaded sequence classifier with one label."""

    def logits(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """Return the logit of each text, at least one, given as tokens, at least one.

        Each is the one of that text alone, read at its last token that is not the padding of the model's
        configuration. May raise anything.
        """


VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpu(device: str, number: str) -> str:
    """Return the name of a GPU for CUDA_VISIBLE_DEVICES.

    Args:
        device: the option, for errors.
        number: of the GPU, among the ones that this process sees.

    Raises:
        SettingsError: this process sees fewer.
    """
    given = [item for item in os.environ.get(VISIBLE, "").split(",") if item]
    if given and int(number) >= len(given):
        raise SettingsError(f"option device: {device!r}, but {VISIBLE} names {len(given)} GPUs")
    return given[int(number)] if given else number


def without_padding(tokens: Sequence[int], pad: int | None) -> list[int]:
    """Return a text without padding at its end, which the engine would otherwise read as its last token."""
    end = len(tokens)
    while end > 1 and tokens[end - 1] == pad:
        end -= 1
    return list(tokens[:end])


ARCHITECTURE = "ForSequenceClassification"
"""End of the name of an architecture that is a classifier."""


def check_classifier(directory: Path, named: str) -> None:
    """Check that a directory holds a classifier of one label; `named` begins errors.

    Raises:
        SettingsError: it does not; names what it holds.
    """
    path = directory / "config.json"
    try:
        config = json.loads(path.read_bytes())
        names = list(config.get("architectures") or [])
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise SettingsError(
            f"{named} no model in {directory}: {error}; give a Hugging Face directory or the "
            "name of a model on the hub"
        ) from None
    labels = len(config.get("id2label") or {}) or int(config.get("num_labels") or 2)
    if not any(str(name).endswith(ARCHITECTURE) for name in names) or labels != 1:
        raise SettingsError(
            f"{named} {directory} is {', '.join(map(str, names)) or 'unnamed'} with {labels} "
            f"label(s); it has to be an architecture that ends with {ARCHITECTURE}, with one"
        )
