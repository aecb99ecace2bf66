"""Defines for every setting whether it may change on resume.

`python docs/settings_pages.py` generates docs/resume.md from `RULES`.
"""

from collections.abc import Mapping
from enum import StrEnum

from rollout.prompts.base import NOT_IN_FINGERPRINT


class ResumeRule(StrEnum):
    """Whether a changed setting is refused, applied or ignored on resume."""

    BOUND = "bound"  # applied at the first moment at which rule F allows it
    FIXED = "fixed"  # refused
    DRAINED = "drained"  # refused while samples wait to be trained
    REPEATED = "repeated"  # applied; steps that no checkpoint covers are repeated with the new value
    TRAINED = "trained"  # refused while the draft head is trained
    FREE = "free"  # applied


_STREAM = "group g is prompt g of the stream, which it changes"
_LAYOUT = "a checkpoint is restored in any layout, but float additions have another order there"
_STATE = "the optimizer's state in the checkpoint is that of the trained tensors"
_DRAWN = (
    "samples that wait to be trained were drawn with the old value; their log-probabilities would not fit"
)
_FROZEN = "the run's steps were made with that model, whose digest RUN_DIR/frozen_models.json has"
_STEP = "a step computes with it"
_CHOSEN = "`trainer.micro_batch_tokens` = auto is chosen for it"

RULES: Mapping[str, tuple[ResumeRule, str]] = {
    "run.name": (ResumeRule.FIXED, "the ledger knows the run by its name"),
    "run.steps": (ResumeRule.FREE, "the ledger takes it over; fewer than the run has made are refused"),
    "bound.max_staleness": (ResumeRule.BOUND, "a lease keeps the bound that it was granted under"),
    "bound.groups_per_step": (ResumeRule.BOUND, "a batch that was taken stays as it is"),
    "bound.staleness_policy": (ResumeRule.BOUND, "a batch that was taken stays as it is"),
    "bound": (ResumeRule.FREE, "the ledger takes the limits over; a halted run counts anew"),
    "model": (ResumeRule.FIXED, "checkpoints, references and tokens of the run are those of its model"),
    "prompts": (ResumeRule.FIXED, _STREAM),
    **{
        f"prompts.{name}": (ResumeRule.FREE, "the prompts themselves count: others are refused")
        for name in sorted(NOT_IN_FINGERPRINT)
    },
    "render.tokenizer": (ResumeRule.FIXED, "prompts, samples and exports of the run are of its tokens"),
    "sampling.temperature": (ResumeRule.DRAINED, _DRAWN),
    "sampling.top_p": (ResumeRule.DRAINED, _DRAWN),
    "sampling.top_k": (ResumeRule.DRAINED, _DRAWN),
    "environment.record": (
        ResumeRule.DRAINED,
        "a group that was begun with a record is continued on it, and verified with it",
    ),
    "engine.dtype": (ResumeRule.REPEATED, "weights are published in it"),
    "engine.draft_model": (ResumeRule.TRAINED, "checkpoints hold the head that was made of it"),
    "engine.draft_lr": (ResumeRule.REPEATED, "versions have the head if it is trained"),
    "trainer.backend": (ResumeRule.FIXED, "each backend has checkpoints of its own form"),
    "trainer.dtype": (ResumeRule.REPEATED, "a checkpoint holds masters, of which parameters are made"),
    "trainer.seed": (ResumeRule.FIXED, "the state of the random numbers is in the checkpoint"),
    "trainer.device": (ResumeRule.REPEATED, _STEP),
    "trainer.fp8": (ResumeRule.REPEATED, _STEP),
    "trainer.attention_backend": (ResumeRule.REPEATED, _STEP),
    "trainer.micro_batch_tokens": (ResumeRule.REPEATED, _STEP),
    "trainer.micro_batch_size": (ResumeRule.REPEATED, _STEP),
    "trainer.share_prefixes": (ResumeRule.REPEATED, _STEP),
    "trainer.recompute_granularity": (ResumeRule.REPEATED, _STEP),
    "trainer.recompute_method": (ResumeRule.REPEATED, _STEP),
    "trainer.recompute_num_layers": (ResumeRule.REPEATED, _STEP),
    "trainer.recompute_modules": (ResumeRule.REPEATED, _STEP),
    "trainer.moe_aux_loss_coeff": (ResumeRule.REPEATED, _STEP),
    "trainer.moe_z_loss_coeff": (ResumeRule.REPEATED, _STEP),
    "trainer.moe_router_bias_update_rate": (ResumeRule.REPEATED, _STEP),
    "trainer.memory_gb": (ResumeRule.REPEATED, _CHOSEN),
    "trainer.memory_fraction": (ResumeRule.REPEATED, _CHOSEN),
    "trainer.threads": (ResumeRule.REPEATED, _STEP),
    "trainer.recompute_logprobs": (ResumeRule.REPEATED, _STEP),
    "trainer.epochs_per_batch": (ResumeRule.REPEATED, _STEP),
    "trainer.num_mini_batches": (ResumeRule.REPEATED, _STEP),
    "weights.transport": (ResumeRule.REPEATED, _CHOSEN),
    "weights.backend": (ResumeRule.REPEATED, _CHOSEN),
    "weights.delta": (ResumeRule.REPEATED, _CHOSEN),
    "cluster.nodes": (ResumeRule.REPEATED, _CHOSEN),
    "parallel": (ResumeRule.REPEATED, _LAYOUT),
    "placement": (ResumeRule.REPEATED, "the model is the same, but its float additions have another order"),
    "optimizer.name": (ResumeRule.FIXED, "the state in the checkpoint is that optimizer's"),
    "optimizer": (ResumeRule.REPEATED, _STEP),
    "algorithm": (ResumeRule.REPEATED, _STEP),
    "algorithm.filter_groups": (ResumeRule.FREE, "groups that are scored from then on"),
    "algorithm.group_filter": (ResumeRule.FREE, "groups that are scored from then on"),
    "algorithm.max_filtered_batches": (ResumeRule.FREE, "groups that are scored from then on"),
    "critic": (ResumeRule.REPEATED, _STEP),
    "critic.path": (ResumeRule.FIXED, "checkpoints hold the critic that was made of it"),
    "critic.revision": (ResumeRule.FIXED, "checkpoints hold the critic that was made of it"),
    "lora": (ResumeRule.FIXED, _STATE),
    "lora.dropout": (ResumeRule.REPEATED, _STEP),
    "reference": (ResumeRule.FIXED, _FROZEN),
    "reference.offload": (ResumeRule.FREE, "the model computes the same"),
    "teacher": (ResumeRule.FIXED, _FROZEN),
    "teacher.offload": (ResumeRule.FREE, "the model computes the same"),
    "reward_model": (ResumeRule.FIXED, _FROZEN),
    "reward_model.offload": (ResumeRule.FREE, "the model computes the same"),
}
"""Setting, or section for all of its other settings -> rule and reason."""
DEFAULT = (ResumeRule.FREE, "")
"""Rule and reason of every other setting."""
DECIDING = frozenset(
    {
        "algorithm", "critic", "engine.draft_lr", "engine.dtype", "environment", "lora.dropout", "optimizer",
        "render", "reward.verifiers", "sampling.keep_first", "sampling.temperature", "sampling.top_k",
        "sampling.top_p", "trainer.dtype", "trainer.epochs_per_batch", "trainer.fp8",
        "trainer.moe_aux_loss_coeff", "trainer.moe_router_bias_update_rate", "trainer.moe_z_loss_coeff",
        "trainer.num_mini_batches", "trainer.recompute_logprobs",
    }
)  # fmt: skip
"""Settings and sections that change records or steps by more than rounding."""
NOT_COMPARED = frozenset({"run.dir", "ledger.url"})
"""Settings with the location of a run, which are not stored in the run."""


def rule_of(dotted: str) -> tuple[ResumeRule, str]:
    """Return the rule and reason of a setting, from the setting itself or its section."""
    parts = dotted.split(".")
    keys = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((RULES[key] for key in keys if key in RULES), DEFAULT)


def decides_records(dotted: str) -> bool:
    """Return whether a setting changes records or steps by more than rounding."""
    return bool(DECIDING & {dotted, dotted.partition(".")[0]})
