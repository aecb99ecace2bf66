"""Makes steps of several updates in a plain loop over Hugging Face's model and torch's AdamW."""

import dataclasses
import math
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from protocol.codec import encode_payload
from tests.trainer.algorithms import naive
from tests.trainer.commands import train_command
from tests.trainer.groups import GroupSpec, SampleSpec, scored, whole
from trainer.algorithms import AlgorithmConfig, make_algorithm
from trainer.batch import Batch
from trainer.config import OptimizerConfig
from trainer.step.train_command import TrainCommand, plan_command

# eps: gradients that are rounding errors, such as those of the keys' biases, move nothing
OPTIMIZER = OptimizerConfig(lr=3e-3, lr_warmup_steps=4, weight_decay=0.1, adam_eps=1e-4)
RECIPES = {
    "decoupled": AlgorithmConfig(
        importance_cap=1.1,
        entropy_coef=0.01,
        entropy_target=2.5,
        entropy_coef_delta=0.004,
        entropy_coef_max=0.03,
    ),
    "m2po": AlgorithmConfig(
        name="m2po", second_moment_threshold=0.02, clip_low=0.05, clip_high=0.05, ess_scaling="sqrt"
    ),
    "interpolated": AlgorithmConfig(name="dr_grpo", proximal_policy="interpolated", importance_cap=1.2),
}
STEPS = 3
BRANCHES = ((0, -1, 0), (0, 0, 4), (1, -1, 0), (2, -1, 0), (2, 3, 2), (2, 4, 0))


def command(recipe: str, step: int, *, epochs: int = 2, mini_batches: int = 3) -> TrainCommand:
    """Four groups of three samples, two of which have branches: lags 0 to 2, tokens over the bound, inserted
    ones."""
    generator = torch.Generator().manual_seed(step)
    records = []
    for group in range(4):
        samples = []
        for length in (6, 2, 3, 5, 4, 3):
            tokens = torch.randint(2, 16, (length,), generator=generator).tolist()
            logprobs = (-2.7 + 0.3 * torch.randn(length, generator=generator)).tolist()
            versions = sorted(max(step + 4 - (group + i) % 4, 0) for i in range(length))
            mask = [int(i != 1) for i in range(length)]
            samples.append(SampleSpec(tokens, versions, float(length == 3), mask, logprobs))
        spec = GroupSpec(4 * step + group, prompt=[3, 4, 5], samples=samples, branches=BRANCHES)
        records.append(encode_payload(scored(spec)))
    return train_command(
        step + 4, records, bound=2, temperature=0.8, recompute_logprobs=recipe != "m2po", epochs=epochs,
        mini_batches=mini_batches, seed=7,
    )  # fmt: skip


class PlainLoop:
    """What every backend and layout must agree with."""

    def __init__(self, model_dir: Path, recipe: str) -> None:
        self.config = RECIPES[recipe]
        self.model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
        decayed = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim <= 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": OPTIMIZER.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            betas=(OPTIMIZER.adam_beta1, OPTIMIZER.adam_beta2),
            eps=OPTIMIZER.adam_eps,
        )
        self.updates = 0
        self.bonus, self.below = self.config.entropy_coef, True

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies [t], float64."""
        found = []
        for tokens in batch.tokens.long().split(batch.lengths.tolist()):
            logits = self.model(input_ids=tokens[None]).logits[0, :-1].double()
            table = (logits / batch.temperature).log_softmax(-1)
            both = table.gather(-1, tokens[1:, None])[:, 0], -(table.exp() * table).sum(-1)
            found.append([torch.nn.functional.pad(values, (1, 0)) for values in both])
        logprobs, entropy = (torch.cat(values) for values in zip(*found, strict=True))
        return logprobs, entropy

    def step(self, made: TrainCommand) -> dict[str, float]:
        """Make the updates of a step; returns what it should report."""
        config = self.config
        plan = plan_command(made, make_algorithm(config))
        batch = whole(plan)
        rewards, groups = (
            naive.of_samples(batch, values.tolist()) for values in (batch.rewards, batch.group_index)
        )
        scores = naive.advantages(config, rewards, groups)
        with torch.no_grad():
            start = self.forward(batch)[0].float()
        losses, scales = [], []
        seen, tokens, bonus = 0.0, 0, self.bonus if self.below else 0.0
        for number in plan.mini_batches.order(made.epochs):
            chosen = plan.mini_batches.by_sample == number
            rows = chosen[torch.tensor(naive.owners(batch))]
            of_tokens = rows[batch.sample_index]
            part = dataclasses.replace(batch.select(rows.nonzero()[:, 0]), start_logprobs=start[of_tokens])
            logprobs, entropy = self.forward(part)
            cap = math.inf
            if config.second_moment_threshold:
                cap = naive.clip_of(
                    config, part, logprobs.tolist(), dict(enumerate(part.advantages.tolist()))
                )
            loss = naive.step_loss(
                dataclasses.replace(
                    config, entropy_coef=bonus if config.entropy_target else config.entropy_coef
                ),
                part,
                logprobs,
                entropy,
                scores=[score for score, own in zip(scores, chosen.tolist(), strict=True) if own],
                cap=cap,
            )
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), OPTIMIZER.clip_grad)
            self.updates += 1
            losses.append(loss.item())
            scales.append(self.share(part, logprobs.detach()))
            for group in self.optimizer.param_groups:
                group["lr"] = OPTIMIZER.lr * min(1.0, self.updates / OPTIMIZER.lr_warmup_steps) * scales[-1]
            self.optimizer.step()
            seen += float(entropy[part.loss_mask].detach().sum())
            tokens += int(part.loss_mask.sum())
        if config.entropy_target:
            below = seen / tokens < config.entropy_target
            change = config.entropy_coef_delta if below else -config.entropy_coef_delta
            self.bonus = min(max(self.bonus + change, 0.0), config.entropy_coef_max)
            self.below = below
        report = {"loss": sum(losses) / len(losses), "entropy": seen / tokens}
        report["trained_tokens"] = int(batch.loss_mask.sum())
        if config.ess_scaling:
            report["lr_scale"] = sum(scales) / len(scales)
        if config.entropy_target:
            report["entropy_coef"] = bonus
        return report

    def share(self, part: Batch, logprobs: torch.Tensor) -> float:
        """The root of the effective sample size as a share of the samples; a row counts by its tokens."""
        if not self.config.ess_scaling:
            return 1.0
        moved = (logprobs - part.behaviour_logprobs) * part.loss_mask
        samples = part.sample_index[part.loss_mask].unique().tolist()
        weights = [math.exp(float(moved[part.sample_index == sample].sum())) for sample in samples]
        parts = naive.shares_of_rows(part)
        counts = [parts[row] for row in samples]
        pairs = list(zip(weights, counts, strict=True))
        return math.sqrt(sum(w * n for w, n in pairs) ** 2 / (sum(counts) * sum(n * w**2 for w, n in pairs)))

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach() for name, tensor in self.model.named_parameters()}
