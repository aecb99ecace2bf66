"""Scores with a reward model: a Hugging Face sequence classifier with one label, loaded once per worker.

torch, transformers and vLLM are imported when the model is loaded, not when the settings are validated.
"""

import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from protocol.choices import load
from protocol.errors import SettingsError
from protocol.host.hub import Kind, fetch, is_hub_name, resolve_commit
from reward.classifiers.base import Classifier, Options, check_classifier
from reward.group import ResponseGroup, Verdict
from reward.verifiers.base import LoadedVerifier

__all__ = ["Options", "RewardModel"]

NAMED = "verifier reward_model:"
CLASSIFIERS = {
    "transformers": "reward.classifiers.hf:HfClassifier",
    "vllm": "reward.classifiers.vllm_engine:VllmClassifier",
    "sglang": "reward.classifiers.sglang_engine:SglangClassifier",
}
"""Option `engine` -> classifier class, imported when the model is loaded."""


class RewardModel(LoadedVerifier):
    """Verifier that scores with a reward model."""

    at_once = True

    def __init__(self, options: Options) -> None:
        """Validate the options. `load` loads the model.

        Raises:
            SettingsError: an option is invalid, or the directory contains no classifier with one label.
        """
        _check_devices(options)
        _check_python(options)
        self._options = options
        self.maps_device_memory = options.device != "cpu"
        if not is_hub_name(options.path):
            check_classifier(Path(options.path), NAMED)
        self._tokenizer: Any = None
        self._classifier: Classifier | None = None
        self._limit = self._pad = 0

    def load(self) -> None:
        """Load model and tokenizer.

        Raises:
            SettingsError: loading failed. The message names the path.
        """
        from transformers import AutoConfig, AutoTokenizer

        options = self._options
        directory = Path(options.path)
        if is_hub_name(options.path):
            commit = resolve_commit(Kind.MODEL, options.path, options.revision)
            directory = fetch(Kind.MODEL, options.path, commit)
            check_classifier(directory, NAMED)
        try:
            config = AutoConfig.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=False
            )
            self._limit = options.max_length or getattr(config, "max_position_embeddings", None) or 0
            self._pad = config.pad_token_id or 0
            self._tokenizer = AutoTokenizer.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=False
            )
            placed = replace(options, path=str(directory), max_length=self._limit)
            self._classifier = load(CLASSIFIERS[options.engine])(placed)
        except SettingsError as error:
            raise SettingsError(f"verifier reward_model: {error}") from None
        except ModuleNotFoundError as error:
            raise SettingsError(
                f"verifier reward_model: option engine: {options.engine!r}: this Python has no {error.name}"
            ) from None
        except Exception as error:  # transformers and torch raise any exception
            text = " ".join(str(error).split())
            raise SettingsError(
                f"verifier reward_model: {options.path} cannot be loaded on {options.device} by "
                f"{options.engine}: {type(error).__name__}: {text[:300]}"
            ) from error
        if options.text == "chat" and not self._tokenizer.chat_template:
            raise SettingsError(
                f"verifier reward_model: the tokenizer in {options.path} has no chat template; use plain"
            )

    def score(self, group: ResponseGroup, samples: Sequence[int]) -> list[Verdict]:
        """Return the scores of `samples`. A score does not depend on the other samples."""
        if self._classifier is None:
            self.load()
        assert self._classifier is not None
        texts = [self._tokens(group.prompt, group.responses[i]) for i in samples]
        logits = self._classifier.logits(texts)
        return [_sigmoid(logit) if self._options.sigmoid else logit for logit in logits]

    def _tokens(self, prompt: str, response: str) -> list[int]:
        options, tokenizer = self._options, self._tokenizer
        chat = options.text == "chat" or (options.text == "auto" and bool(tokenizer.chat_template))
        text = f"{prompt}{options.separator}{response}"
        if chat:
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
            text = tokenizer.apply_chat_template(turns, tokenize=False)
        cut = {"truncation": True, "max_length": self._limit} if self._limit else {}
        tokens: list[int] = tokenizer.encode(text, add_special_tokens=not chat, **cut)
        return tokens or [self._pad]


def _check_devices(options: Options) -> None:
    """Validate the options of devices. Raises SettingsError."""
    if options.device.partition(":")[0] not in ("cpu", "cuda"):
        raise SettingsError(
            f"verifier reward_model: option device: {options.device!r}; use cpu, cuda or cuda:N"
        )
    tensor = options.tensor_parallel_size
    if tensor > 1 and options.engine == "transformers":
        raise SettingsError(
            f"verifier reward_model: option tensor_parallel_size: {tensor}: transformers computes on one "
            "device; remove the option, or use engine = 'vllm' or 'sglang'"
        )
    if tensor > 1 and ":" in options.device:
        raise SettingsError(
            f"verifier reward_model: option device: {options.device!r}: a model on {tensor} GPUs has the "
            "first ones that the worker sees; use cuda, and name them in services.reward_gpus"
        )


def _check_python(options: Options) -> None:
    """Validate the options of an engine with its own Python. Raises SettingsError."""
    for name in ("python", "environment"):
        if getattr(options, name) and options.engine != "sglang":
            raise SettingsError(
                f"verifier reward_model: option {name}: {options.engine} computes in the worker's process; "
                "remove the option, or use engine = 'sglang'"
            )
    if options.python and shutil.which(options.python) is None:
        raise SettingsError(
            f"verifier reward_model: option python: {options.python!r} is not a program; name the Python "
            "that has SGLang"
        )


def _sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit)) if logit >= 0 else 1 - 1 / (1 + math.exp(logit))
