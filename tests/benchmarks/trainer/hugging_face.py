"""Trains a step with plain Hugging Face transformers and torch: what a short script of one's own does.

Shapes: n samples of a micro-batch, w tokens of its longest one, k trained tokens of it.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from tests.benchmarks.trainer.samples import sorted_and_padded
from trainer.batch import Batch

CLIP = 0.2
CLIP_GRAD = 1.0


class HuggingFaceStep:
    """AdamW on float32 masters; sorted, padded micro-batches; logits of trained tokens alone."""

    def __init__(self, model_dir: Path, *, dtype: torch.dtype, lr: float, budget: int) -> None:
        """Load a model; `budget` is the tokens of a micro-batch with its padding."""
        self._model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=dtype, local_files_only=True, attn_implementation="sdpa"
        )
        self._budget = budget
        self._parameters = list(self._model.parameters())
        self._masters = (
            self._parameters
            if dtype is torch.float32
            else [torch.nn.Parameter(p.detach().float()) for p in self._parameters]
        )
        self._optimizer = torch.optim.AdamW(
            self._masters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def step(self, batch: Batch) -> float:
        """Make an optimizer step on a batch, and return the norm of its gradient."""
        lengths, starts = batch.lengths.tolist(), batch.offsets.tolist()
        for samples in sorted_and_padded(lengths, self._budget):
            spans = [slice(starts[sample], starts[sample + 1]) for sample in samples]
            self._backward(batch, samples, spans)
        if self._masters is not self._parameters:
            for master, parameter in zip(self._masters, self._parameters, strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.float()
        norm = torch.nn.utils.clip_grad_norm_(self._masters, CLIP_GRAD)
        self._optimizer.step()
        for parameter in (*self._masters, *self._parameters):
            parameter.grad = None
        if self._masters is not self._parameters:
            with torch.no_grad():
                torch._foreach_copy_(self._parameters, self._masters)
        return float(norm)

    def _backward(self, batch: Batch, samples: list[int], spans: list[slice]) -> None:
        tokens = _padded(batch.tokens, spans).long()  # [n, w]
        trained = _padded(batch.loss_mask, spans)[:, 1:]
        # Padding is on the right, where no causal attention of a real token looks: no mask, the fast kernel.
        hidden = self._model.model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
        logits = self._model.lm_head(hidden[trained]).float()
        logprobs = -F.cross_entropy(logits, tokens[:, 1:][trained], reduction="none")  # [k]
        old = _padded(batch.behaviour_logprobs, spans)[:, 1:][trained]
        advantages = _padded(batch.advantages, spans)[:, 1:][trained]
        ratio = (logprobs - old).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
        weights = batch.weights[samples][:, None].expand_as(trained)[trained]
        (-(gain * weights).sum()).backward()


def _padded(values: torch.Tensor, spans: list[slice]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([values[span] for span in spans], batch_first=True)
