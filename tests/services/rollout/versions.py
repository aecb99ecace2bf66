"""Makes a small model and versions of its weights, and decides which versions can have made which tokens."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

VOCAB = 64
TIE = 1e-3
"""Logits closer than this are as good as equal: a forward pass over all tokens rounds otherwise than one over
each."""

Weights = Mapping[str, torch.Tensor]


class Versions:
    """Makes weights, and recomputes greedy tokens with them."""

    def __init__(self) -> None:
        config = Qwen2Config(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2,
            max_position_embeddings=256, tie_word_embeddings=False,
        )  # fmt: skip
        self.model = Qwen2ForCausalLM(config).eval()
        self._generator = torch.Generator().manual_seed(0)

    def write_config(self, directory: Path) -> Path:
        """Write and return a model directory without weights."""
        directory.mkdir(parents=True, exist_ok=True)
        self.model.config.save_pretrained(directory)
        return directory

    def new(self) -> Weights:
        """Return weights that soon disagree with all others on a token."""
        return {
            name: torch.randn(tensor.shape, generator=self._generator) * 0.3
            for name, tensor in self.model.named_parameters()
        }

    @torch.no_grad()
    def could_make(
        self, candidates: Sequence[Weights], context: Sequence[int], tokens: Sequence[int]
    ) -> bool:
        """Return whether each token is the greedy one after those before it, under one of the candidates."""
        ids = torch.tensor([[*context, *tokens]])
        fits = torch.zeros(len(tokens), dtype=torch.bool)
        for weights in candidates:
            logits = torch.func.functional_call(self.model, dict(weights), (ids,)).logits[
                0, len(context) - 1 : -1
            ]
            found = logits.gather(1, torch.tensor(list(tokens))[:, None])[:, 0]
            fits |= found >= logits.max(1).values - TIE
        return bool(fits.all())
