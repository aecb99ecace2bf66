"""Defines the options of the verifier `reward_model`, and the interface of its classifiers."""

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
    """Device of the model: cpu, cuda or cuda:N."""
    dtype: Literal["bfloat16", "float16", "float32"] = "float32"
    """Data type of the parameters."""
    max_length: Annotated[int, Interval(ge=0)] = 0
    """Limit of prompt and response together, tokens. Longer texts are truncated at the end. 0: the model's
    number of positions."""
    batch_size: Annotated[int, Interval(ge=1)] = 16
    """Maximum number of responses of a group in one pass."""
    text: Literal["auto", "chat", "plain"] = "auto"
    """Format of the model's input. chat: the tokenizer's chat template, with the prompt as user turn and the
    response as assistant turn. plain: prompt and response as one text. auto: chat if the tokenizer has a
    template."""
    separator: str = ""
    """plain: text between prompt and response."""
    sigmoid: bool = False
    """Score the sigmoid of the logit, between 0 and 1, instead of the logit."""
    threads: Annotated[int, Interval(ge=1)] = 1
    """Threads of a worker on the CPU."""
    engine: Literal["transformers", "vllm", "sglang"] = "transformers"
    """Library that runs the model, in the worker process or, for sglang, in child processes."""
    memory_fraction: Annotated[float, Interval(gt=0, le=1)] = 0.3
    """Engines on a GPU: share of the GPU's memory for weights and KV cache."""
    kv_cache_mb: Annotated[int, Interval(ge=1, le=10**9)] = 1024
    """Engines on a CPU: size of the KV cache, MiB."""
    tensor_parallel_size: Annotated[int, Interval(ge=1, le=4096)] = 1
    """Number of devices that an engine shards the model over, from `device` on, with one process each."""
    python: str = ""
    """sglang: Python interpreter with SGLang installed. Empty: the reward worker's."""
    environment: dict[str, str] = field(default_factory=dict)
    """sglang: environment variables of its processes."""


class Classifier(Protocol):
    """A loaded sequence classifier with one label."""

    def logits(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """Return the logit of each text. Texts are token lists; neither the list nor a text is empty.

        A logit does not depend on the other texts. It is read at the text's last token that is not the
        padding token of the model's configuration. May raise any exception.
        """


VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpu(device: str, number: str) -> str:
    """Return the name of a GPU for CUDA_VISIBLE_DEVICES.

    Args:
        device: option `device`, for errors.
        number: index of the GPU among the GPUs visible to this process.

    Raises:
        SettingsError: this process sees fewer GPUs.
    """
    given = [item for item in os.environ.get(VISIBLE, "").split(",") if item]
    if given and int(number) >= len(given):
        raise SettingsError(f"option device: {device!r}, but {VISIBLE} names {len(given)} GPUs")
    return given[int(number)] if given else number


def without_padding(tokens: Sequence[int], pad: int | None) -> list[int]:
    """Return a text without trailing padding, which the engine would otherwise read as its last token."""
    end = len(tokens)
    while end > 1 and tokens[end - 1] == pad:
        end -= 1
    return list(tokens[:end])


ARCHITECTURE = "ForSequenceClassification"
"""Suffix of the architecture names of classifiers."""


def check_classifier(directory: Path, named: str) -> None:
    """Check that a directory contains a classifier with one label. `named` is the prefix of errors.

    Raises:
        SettingsError: the model is missing or not such a classifier. The message names its architecture.
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
            f"label(s); use an architecture ending in {ARCHITECTURE}, with one label"
        )
