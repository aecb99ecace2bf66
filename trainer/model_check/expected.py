"""Draws random samples, and computes their expected log-probabilities with Hugging Face's model.

Shapes: t tokens of all samples.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from protocol.device.hf_models import apply_config, code_trust
from protocol.errors import SettingsError
from trainer.batch import Batch, StepTotals

SAMPLES = 8
LONGEST = 128
"""Maximum length of a sample, tokens; limited by the model's positions."""
SHORTEST = 2
"""Minimum length of a sample: one given token and one to predict."""


def random_samples(vocabulary: int, positions: int) -> Batch:
    """Return samples of random tokens and unequal lengths. Every token except the first is sampled.

    Args:
        vocabulary: number of tokens to draw from.
        positions: the model's number of positions, which limits the longest sample.
    """
    generator = torch.Generator().manual_seed(0)
    longest = max(SHORTEST, min(LONGEST, positions))
    lengths = torch.randint(SHORTEST, longest + 1, (SAMPLES,), generator=generator)
    lengths[0] = longest
    return batch_of(torch.randint(0, vocabulary, (int(lengths.sum()),), generator=generator), lengths)


def batch_of(tokens: torch.Tensor, lengths: torch.Tensor) -> Batch:
    """Return tokens (integers [t]) of samples with these lengths (int64 [n]) as a batch without a loss."""
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    size, samples = len(tokens), len(lengths)
    sampled = torch.ones(size, dtype=torch.bool)
    sampled[offsets[:-1]] = False
    return Batch(
        step=0,
        totals=StepTotals(samples=samples, trained_tokens=0, lag_max=0, fresh=False),
        offsets=offsets,
        tokens=tokens.int(),
        loss_mask=torch.zeros(size, dtype=torch.bool),
        sampled_mask=sampled,
        behaviour_logprobs=torch.zeros(size),
        versions=sampled.int() - 1,
        advantages=torch.zeros(size),
        group_index=torch.arange(samples),
        rewards=torch.zeros(samples),
        weights=torch.zeros(samples),
        measured=torch.zeros(samples, dtype=torch.bool),
    )


@torch.no_grad()
def hf_logprobs(model_dir: Path, batch: Batch) -> torch.Tensor:
    """Return the sampled tokens' log-probabilities from transformers in float32, 0 for other tokens, [t].

    Each sample is a separate pass, without padding, with eager attention.

    Raises:
        SettingsError: transformers cannot load or run the model.
    """
    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            model_dir,
            dtype=torch.float32,
            local_files_only=True,
            attn_implementation="eager",
            **code_trust(),
        ).eval()
    except (OSError, ValueError, RuntimeError) as error:
        raise SettingsError(f"{model_dir}: transformers cannot load it: {error}") from error
    apply_config(model)
    rows = []
    for tokens in batch.tokens.long().split(batch.lengths.tolist()):
        try:
            logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].float()
        except Exception as error:  # the model's code may raise anything
            raise SettingsError(f"{model_dir}: transformers cannot make a pass of it: {error}") from error
        picked = torch.log_softmax(logits, -1).gather(-1, tokens[1:, None])[:, 0]
        rows += [picked.new_zeros(1), picked]
    return torch.cat(rows)
