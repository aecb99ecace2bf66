"""Makes tiny checkpoints and batches, and trains them in plain torch for comparison."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from tests.trainer.measured import expected
from trainer.algorithms.base import Algorithm
from trainer.algorithms.grpo import Grpo
from trainer.batch import Batch, StepTotals, trained_tokens
from trainer.config import AlgorithmConfig, OptimizerConfig

BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "attn_implementation": "eager",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS = {
    "qwen2": ("Qwen2", {"vocab_size": 131, "tie_word_embeddings": False}),
    "qwen2-tied": ("Qwen2", {"vocab_size": 96, "tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3-tied": ("Qwen3", {"vocab_size": 131, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "llama": (
        "Llama",
        {
            "vocab_size": 96,
            "tie_word_embeddings": False,
            "rope_parameters": LLAMA3_ROPE,
            "num_key_value_heads": 4,
        },
    ),
}
"""Trained in every layout."""
MORE_MODELS = {
    "mistral": ("Mistral", {"vocab_size": 96, "sliding_window": 5}),
    "olmo2": ("Olmo2", {"vocab_size": 96, "tie_word_embeddings": False, "pad_token_id": None}),
    "qwen3-yarn": (
        "Qwen3",
        {"vocab_size": 96, "tie_word_embeddings": False, "rope_parameters": YARN_ROPE},
    ),
    "phi3": ("Phi3", {"vocab_size": 131, "tie_word_embeddings": False, "pad_token_id": None}),
}
"""Trained in few layouts: these differ from the others in what every layout treats alike."""
DEEP_MODELS = {
    "qwen3-deep": (
        "Qwen3",
        {"vocab_size": 131, "tie_word_embeddings": True, "num_hidden_layers": 4},
    ),
    "qwen2-deep": ("Qwen2", {"vocab_size": 96, "tie_word_embeddings": False, "num_hidden_layers": 4}),
}
"""Trained in layouts for which two layers are too few. The vocabulary of the first has an odd size, so it is
padded for two tensor ranks, and its embedding is the output layer."""
ALL_MODELS = MODELS | MORE_MODELS | DEEP_MODELS
SHARDED = "llama"
"""Saved in several files, with an index."""
OPTIMIZER = OptimizerConfig(lr=1e-3, lr_warmup_steps=2, weight_decay=0.1, adam_eps=1e-5, clip_grad=0.5)


def make_model(name: str, **overrides: object) -> PreTrainedModel:
    """A model without a trivial tensor: norms and biases differ from 1 and 0."""
    family, fields = ALL_MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**BASE, **fields, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = getattr(transformers, f"{family}ForCausalLM")(config).float()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def save_model(name: str, directory: Path) -> Path:
    path = directory / name
    if not path.exists():
        make_model(name).save_pretrained(path, max_shard_size="100KB" if name == SHARDED else "1GB")
    return path


def make_batch(
    name: str,
    seed: int = 0,
    *,
    samples: int = 13,
    length: int = 12,
    prompt: int = 4,
    temperature: float = 0.7,
) -> Batch:
    """Responses of unequal length; some sampled tokens are over the bound, one sample trains no token at
    all."""
    vocabulary = int(ALL_MODELS[name][1]["vocab_size"])
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(prompt + 1, length + 1, (samples,), generator=generator)
    lengths[0] = length
    position = torch.arange(length)
    inside = position < lengths[:, None]
    sampled = inside & (position >= prompt)
    trained = sampled & (torch.rand(samples, length, generator=generator) < 0.8)
    trained[1:2] = False
    tokens = torch.randint(0, vocabulary, (samples, length), generator=generator)
    behaviour = (-4.5 + 0.5 * torch.randn(samples, length, generator=generator)) * sampled
    advantages = torch.randn(samples, 1, generator=generator) * trained
    versions = torch.where(sampled, torch.where(position % 2 == 0, seed, seed - 1), -1)
    lags = (seed - versions)[trained]
    return Batch(
        step=seed,
        totals=StepTotals(samples, int(trained.sum()), int(lags.max()), bool((lags == 0).any())),
        offsets=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
        tokens=tokens[inside].int(),
        loss_mask=trained[inside],
        sampled_mask=sampled[inside],
        behaviour_logprobs=behaviour[inside],
        versions=versions[inside].int(),
        advantages=advantages[inside],
        group_index=torch.arange(samples) // 4,
        rewards=torch.rand(samples, generator=generator),
        weights=Grpo(AlgorithmConfig()).sample_weights(sampled.sum(1)),
        measured=torch.ones(samples, dtype=torch.bool),
        temperature=temperature,
    )


def step_batch(name: str, step: int) -> Batch:
    """The batch of a step; that of step 1 is one sample, so with several replicas one has none."""
    return make_batch(name, step, samples=1 if step == 1 else 13)


def plain_logprobs(model: Callable[[torch.Tensor], Any], batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """[t] log-probabilities of the tokens and entropies, from the model's own logits, a sample at a time."""
    logprobs, entropies = [], []
    for tokens in batch.tokens.long().split(batch.lengths.tolist()):
        table = torch.log_softmax(model(tokens[None]).logits[0, :-1].float() / batch.temperature, -1)
        logprobs += [table.new_zeros(1), table.gather(-1, tokens[1:, None])[:, 0]]
        entropies += [table.new_zeros(1), -(table.exp() * table).sum(-1)]
    return torch.cat(logprobs), torch.cat(entropies)


def plain_loss(
    algorithm: Algorithm, batch: Batch, logprobs: torch.Tensor, entropy: torch.Tensor
) -> torch.Tensor:
    """The loss of a step, from [t] arrays."""
    mask, tokens = batch.loss_mask, trained_tokens(batch)
    terms = algorithm.token_loss(
        tokens, logprobs[mask], entropy[mask] if algorithm.config.entropy_coef else None
    )
    return (terms.loss * tokens.weights).sum()


class PlainTrainer:
    """Hugging Face model and torch's AdamW, one pass over the whole batch: what every layout must agree
    with."""

    def __init__(self, name: str, algorithm: Algorithm) -> None:
        self.model = make_model(name)
        self.algorithm = algorithm
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [
            {"params": decayed, "weight_decay": OPTIMIZER.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        betas = (OPTIMIZER.adam_beta1, OPTIMIZER.adam_beta2)
        self.optimizer = torch.optim.AdamW(groups, lr=OPTIMIZER.lr, betas=betas, eps=OPTIMIZER.adam_eps)
        self.steps = 0

    def step(self, batch: Batch) -> dict[str, float]:
        logprobs, entropy = plain_logprobs(self.model, batch)
        loss = plain_loss(self.algorithm, batch, logprobs, entropy)
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), OPTIMIZER.clip_grad)
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = OPTIMIZER.lr * min(1.0, self.steps / OPTIMIZER.lr_warmup_steps)
        self.optimizer.step()
        return {
            "loss": loss.item(),
            "grad_norm": norm.item(),
            **expected(batch, logprobs, entropy, clip=self.algorithm.config.clip_low),
        }

    def weights(self) -> dict[str, torch.Tensor]:
        names = {name for name, _ in self.model.named_parameters()}
        return {
            name: tensor.detach().clone() for name, tensor in self.model.state_dict().items() if name in names
        }
