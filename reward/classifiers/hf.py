"""Computes the logits of a sequence classifier with transformers."""

import itertools
from collections.abc import Iterator, Sequence

import torch
from transformers import AutoModelForSequenceClassification

from reward.classifiers.base import Options


class HfClassifier:
    """Hugging Face classifier; the oracle of the other implementations."""

    def __init__(self, options: Options) -> None:
        """Load the model. Raises the errors of transformers and torch."""
        self._device, self._batch_size = options.device, options.batch_size
        torch.set_num_threads(options.threads)
        model = AutoModelForSequenceClassification.from_pretrained(
            options.path,
            dtype=getattr(torch, options.dtype),
            local_files_only=True,
            trust_remote_code=False,
        )
        self._model = model.to(options.device).eval().requires_grad_(False)

    def logits(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """Return the logit of each text."""
        starts = range(0, len(texts), self._batch_size)
        return [logit for start in starts for logit in self._batch(texts[start : start + self._batch_size])]

    def _batch(self, texts: Sequence[Sequence[int]]) -> Iterator[float]:
        pad, longest = self._padding(texts), max(map(len, texts))
        rows = [[*tokens, *[pad] * (longest - len(tokens))] for tokens in texts]
        mask = [[1] * len(tokens) + [0] * (longest - len(tokens)) for tokens in texts]
        config = self._model.config
        saved, config.pad_token_id = config.pad_token_id, pad
        try:
            with torch.inference_mode():
                logits = self._model(
                    input_ids=torch.tensor(rows, device=self._device),
                    attention_mask=torch.tensor(mask, device=self._device),
                ).logits[:, 0]
        finally:
            config.pad_token_id = saved
        yield from logits.float().tolist()

    def _padding(self, texts: Sequence[Sequence[int]]) -> int:
        """Return the padding token: the model's own or, without one, a token in none of the texts.

        The classifier reads a text at its last token that is not padding.
        """
        own = self._model.config.pad_token_id
        taken = set(itertools.chain.from_iterable(texts))
        return next(i for i in itertools.count() if i not in taken) if own is None else int(own)
