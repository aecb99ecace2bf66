"""Scores by a reward model: a sequence classifier of Hugging Face with one label, loaded once by each worker.

torch and transformers are imported when the model is loaded, not when the settings are checked.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from protocol.choices import checked_name
from protocol.errors import SettingsError
from protocol.host.hub import Kind, fetch, is_hub_name, resolve_commit
from reward.group import ResponseGroup, Verdict

TEXTS = ("auto", "chat", "plain")
"""What `Options.text` can be."""
DTYPES = ("bfloat16", "float16", "float32")
ARCHITECTURE = "ForSequenceClassification"
"""End of the name of an architecture that is a classifier."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `reward_model`."""

    path: str
    """Directory of the model and its tokenizer, or the name of a model on the Hugging Face hub."""
    revision: str = ""
    """Branch, tag or commit on the hub. Empty: main. A commit is the same at every start."""
    device: str = "cpu"
    """Where it computes: cpu, cuda or cuda:N."""
    dtype: str = "float32"
    """bfloat16, float16 or float32."""
    max_length: Annotated[int, Meta(ge=0)] = 0
    """Tokens of prompt and response together; more are cut off at the end. 0: as many as the model has
    positions."""
    batch_size: Annotated[int, Meta(ge=1)] = 16
    """Responses of a group in one pass, at most."""
    text: str = "auto"
    """What it reads: the tokenizer's chat template with the prompt as the user's turn and the response as
    the assistant's (chat), prompt and response as one text (plain), or chat if there is a template (auto)."""
    separator: str = ""
    """plain: text between prompt and response."""
    sigmoid: bool = False
    """Score the sigmoid of the logit, between 0 and 1, instead of the logit."""
    threads: Annotated[int, Meta(ge=1)] = 1
    """Threads of a worker on the CPU."""


class RewardModel:
    """Verifier that is a model."""

    at_once = True
    by_turn = False
    file = ""

    def __init__(self, options: Options) -> None:
        """Check the options; the model is loaded by `load`.

        Raises:
            SettingsError: an option is wrong, or the directory holds no classifier of one label.
        """
        checked_name(options.text, TEXTS, "verifier reward_model: option text:")
        checked_name(options.dtype, DTYPES, "verifier reward_model: option dtype:")
        if options.device.partition(":")[0] not in ("cpu", "cuda"):
            raise SettingsError(
                f"verifier reward_model: option device: {options.device!r}; use cpu, cuda or cuda:N"
            )
        self._options = options
        if not is_hub_name(options.path):
            _check_config(Path(options.path))
        self._tokenizer: Any = None
        self._model: Any = None

    @property
    def maps_device_memory(self) -> bool:
        """Whether its library maps more address space than any limit allows."""
        return self._options.device != "cpu"

    def load(self) -> None:
        """Load model and tokenizer.

        Raises:
            SettingsError: they cannot be loaded; names the path.
        """
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        options = self._options
        directory = Path(options.path)
        if is_hub_name(options.path):
            commit = resolve_commit(Kind.MODEL, options.path, options.revision)
            directory = fetch(Kind.MODEL, options.path, commit)
            _check_config(directory)
        torch.set_num_threads(options.threads)
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
            model = AutoModelForSequenceClassification.from_pretrained(
                str(directory), dtype=getattr(torch, options.dtype), local_files_only=True
            )
            self._model = model.to(options.device).eval().requires_grad_(False)
        except Exception as error:  # transformers and torch raise any exception
            text = " ".join(str(error).split())
            raise SettingsError(
                f"verifier reward_model: {options.path} cannot be loaded on {options.device}: "
                f"{type(error).__name__}: {text[:300]}"
            ) from error
        if options.text == "chat" and not self._tokenizer.chat_template:
            raise SettingsError(
                f"verifier reward_model: the tokenizer in {options.path} has no chat template; use plain"
            )

    def score(self, group: ResponseGroup, samples: Sequence[int]) -> list[Verdict]:
        """Return the scores of these samples, each as the model gives it to that text alone."""
        if self._model is None:
            self.load()
        texts = [self._tokens(group.prompt, group.responses[i]) for i in samples]
        size = self._options.batch_size
        starts = range(0, len(texts), size)
        return [score for start in starts for score in self._scores(texts[start : start + size])]

    def _tokens(self, prompt: str, response: str) -> list[int]:
        options, tokenizer = self._options, self._tokenizer
        limit = options.max_length or getattr(self._model.config, "max_position_embeddings", None)
        chat = options.text == "chat" or (options.text == "auto" and bool(tokenizer.chat_template))
        text = f"{prompt}{options.separator}{response}"
        if chat:
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
            text = tokenizer.apply_chat_template(turns, tokenize=False)
        cut = {"truncation": True, "max_length": limit} if limit else {}
        tokens: list[int] = tokenizer.encode(text, add_special_tokens=not chat, **cut)
        return tokens or [self._padding(())]

    def _scores(self, texts: Sequence[list[int]]) -> Iterator[float]:
        import torch

        pad, longest = self._padding(texts), max(map(len, texts))
        rows = [[*tokens, *[pad] * (longest - len(tokens))] for tokens in texts]
        mask = [[1] * len(tokens) + [0] * (longest - len(tokens)) for tokens in texts]
        device, config = self._options.device, self._model.config
        saved, config.pad_token_id = config.pad_token_id, pad
        try:
            with torch.inference_mode():
                logits = self._model(
                    input_ids=torch.tensor(rows, device=device),
                    attention_mask=torch.tensor(mask, device=device),
                ).logits[:, 0]
        finally:
            config.pad_token_id = saved
        scores = logits.float()
        yield from (torch.sigmoid(scores) if self._options.sigmoid else scores).tolist()

    def _padding(self, texts: Sequence[list[int]]) -> int:
        """Return the token that fills up shorter texts: the model's or, without one, one in no text.

        The classifier reads a text at its last token that is not the padding.
        """
        own = self._model.config.pad_token_id
        taken = set(itertools.chain.from_iterable(texts))
        return next(i for i in itertools.count() if i not in taken) if own is None else int(own)


def _check_config(directory: Path) -> None:
    """Check that a directory holds a classifier of one label.

    Raises:
        SettingsError: it does not; names what it holds.
    """
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text())
        names = list(config.get("architectures") or [])
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise SettingsError(
            f"verifier reward_model: no model in {directory}: {error}; give a Hugging Face directory or the "
            "name of a model on the hub"
        ) from None
    labels = len(config.get("id2label") or {}) or int(config.get("num_labels") or 2)
    if not any(str(name).endswith(ARCHITECTURE) for name in names) or labels != 1:
        raise SettingsError(
            f"verifier reward_model: {directory} is {', '.join(map(str, names)) or 'unnamed'} with {labels} "
            f"label(s); it has to be an architecture that ends with {ARCHITECTURE}, with one"
        )
