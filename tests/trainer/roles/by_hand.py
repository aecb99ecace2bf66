"""Trains with a teacher, on given tokens and with penalised rewards by hand: plain torch over transformers.

A token at a time, from the papers. Nothing of the project is used but the batch.
"""

from dataclasses import replace

import torch

from tests.trainer.megatron.models import OPTIMIZER, make_batch, make_model, plain_logprobs
from trainer.batch import Batch
from trainer.config import AlgorithmConfig

STUDENT, OTHER = "qwen3-tied", "qwen2"
"""The policy, and the frozen model: of one vocabulary, of two families."""
CASES = {
    "distilled": AlgorithmConfig(name="on_policy_distillation", opd_kl_coef=0.7, opd_reward_coef=0.4),
    "penalised": AlgorithmConfig(name="rloo", kl_coef=0.05, use_kl_in_reward=True),
    "given": AlgorithmConfig(name="sft"),
}
STEPS = 3


def batch_of(case: str, step: int) -> Batch:
    """Lags of 0 and 1, tokens over the bound, a sample that trains nothing; as a plan would make it."""
    batch = make_batch(STUDENT, step, temperature=1.0)
    samples = len(batch.rewards)
    return replace(
        batch,
        rows=torch.arange(samples),
        behaviour_logprobs=batch.behaviour_logprobs * (case != "given"),
        measured=torch.full((samples,), case != "given"),
    )


def step_loss(case: str, batch: Batch, logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The loss of a step; `logprobs` are the policy's, `other` those of the frozen model, [t]."""
    config = CASES[case]
    spans = [range(*pair) for pair in zip(batch.offsets.tolist(), batch.offsets.tolist()[1:], strict=False)]
    sampled = [[token for token in span if batch.sampled_mask[token]] for span in spans]
    rewards, groups = [float(reward) for reward in batch.rewards], batch.group_index.tolist()
    behaviour = [float(value) for value in batch.behaviour_logprobs]
    theirs = [float(value) for value in other]
    if case == "penalised":
        for sample, tokens in enumerate(sampled):
            rewards[sample] -= config.kl_coef * sum(behaviour[token] - theirs[token] for token in tokens)
    total = logprobs.new_zeros(())
    for sample, tokens in enumerate(sampled):
        group = [reward for i, reward in enumerate(rewards) if groups[i] == groups[sample]]
        others = [rewards[i] for i in range(len(rewards)) if groups[i] == groups[sample] and i != sample]
        for token in tokens:
            if not batch.loss_mask[token]:
                continue
            if case == "given":
                total = total - logprobs[token] / sum(map(len, sampled))
                continue
            if case == "distilled":
                advantage = config.opd_reward_coef * (rewards[sample] - sum(group) / len(group))
                advantage -= config.opd_kl_coef * (behaviour[token] - theirs[token])
                weight = 1 / sum(map(len, sampled))
            else:
                advantage = rewards[sample] - sum(others) / len(others) if others else 0.0
                weight = 1 / len(sampled)
            ratio = torch.exp(logprobs[token] - behaviour[token])
            bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
            total = total - weight * torch.minimum(ratio * advantage, bounded * advantage)
    return total


def trained_by_hand(case: str) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor], torch.Tensor]:
    """Loss and gradient norm of each step, the weights after the last, the frozen model's opinion of the
    first batch."""
    student, other = make_model(STUDENT), make_model(OTHER)
    matrices = [p for p in student.parameters() if p.ndim > 1]
    vectors = [p for p in student.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        betas=(OPTIMIZER.adam_beta1, OPTIMIZER.adam_beta2),
        eps=OPTIMIZER.adam_eps,
        weight_decay=OPTIMIZER.weight_decay,
    )
    found, opinions = [], []
    for step in range(STEPS):
        batch = batch_of(case, step)
        with torch.no_grad():
            opinions.append(plain_logprobs(other, batch)[0])
        loss = step_loss(case, batch, plain_logprobs(student, batch)[0], opinions[-1])
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(student.parameters(), OPTIMIZER.clip_grad)
        for group in optimizer.param_groups:
            group["lr"] = OPTIMIZER.lr * min(1.0, (step + 1) / OPTIMIZER.lr_warmup_steps)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    weights = {name: parameter.detach() for name, parameter in student.named_parameters()}
    return found, weights, opinions[0] * batch_of(case, 0).sampled_mask
