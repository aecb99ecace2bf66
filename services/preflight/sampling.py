"""Finds sampling settings that make training incorrect, ineffective or irreproducible.

The trainer computes log-probabilities over the whole vocabulary at `sampling.temperature`. Engines must
sample from the same distribution; otherwise every importance ratio is wrong.
"""

from collections.abc import Iterator

from protocol.staleness import Policy
from reward.config import can_score_again
from rollout.config import MIN_TEMPERATURE, SamplingConfig
from rollout.engines.base import KvPolicy
from rollout.engines.registry import ENGINES
from services.preflight.problem import Problem
from services.settings.engine_pool import engine_names
from services.settings.sections import Settings
from trainer.algorithms.registry import ALGORITHMS, DISTILLATION

_CUT = (
    "the engine would sample from the tokens that it keeps, while the trainer computes log-probabilities "
    "over the whole vocabulary, so every importance ratio would be wrong"
)
_FIRST = "with sampling.keep_first the time decides which samples are trained; remove that setting"
_INSTEAD = "to train (sampling.temperature is exact; eval.{} is for evaluation)"


def distribution_problems(sampling: SamplingConfig) -> Iterator[Problem]:
    """Yield settings that make engines sample from another distribution than the trainer's."""
    if sampling.top_p < 1:
        yield Problem(_CUT, f"set it to 1 {_INSTEAD.format('top_p')}", "sampling.top_p", sampling.top_p)
    if sampling.top_k:
        yield Problem(_CUT, f"set it to 0 {_INSTEAD.format('top_k')}", "sampling.top_k", sampling.top_k)
    if 0 < sampling.temperature < MIN_TEMPERATURE:
        yield Problem(
            "engines do not sample at so low a temperature, but the trainer would compute with it",
            f"set it to {MIN_TEMPERATURE} or more",
            "sampling.temperature",
            sampling.temperature,
        )


def group_problems(settings: Settings) -> Iterator[Problem]:
    """Yield settings under which the samples of a group have no advantage."""
    sampling, algorithm = settings.sampling, settings.algorithm.name
    coef = settings.algorithm.opd_reward_coef
    if algorithm == DISTILLATION and coef and sampling.samples_per_prompt < 2:
        yield Problem(
            "a reward counts less the mean of its group, which is the reward itself with "
            f"sampling.samples_per_prompt {sampling.samples_per_prompt}, so that it would change nothing",
            "set it to 0, or draw 2 samples or more",
            "algorithm.opd_reward_coef",
            coef,
        )
    if not ALGORITHMS[algorithm].group_relative:
        return
    if sampling.samples_per_prompt < 2:
        yield Problem(
            f"{algorithm} compares the samples of a prompt with each other: the advantage of a single one is "
            "always 0, and nothing would be trained",
            "set it to 2 or more",
            "sampling.samples_per_prompt",
            sampling.samples_per_prompt,
        )
    if sampling.temperature == 0:
        yield Problem(
            f"greedy samples of a prompt are equal, so their {algorithm} advantages are 0, and nothing would "
            "be trained",
            "set it to 1.0 (tether eval scores greedy answers anyway)",
            "sampling.temperature",
            sampling.temperature,
        )


def length_problems(settings: Settings) -> Iterator[Problem]:
    """Yield a problem if the longest prompt and completion together exceed an engine's context."""
    longest, completion = settings.render.max_prompt_tokens, settings.sampling.max_tokens
    context = settings.context_tokens
    room = context - completion
    if room < 1:
        yield Problem(
            f"leaves no token for a prompt in engine.max_model_len = {context}",
            f"set it to {context - 1} or less, or raise engine.max_model_len",
            "sampling.max_tokens",
            completion,
        )
    elif longest > room:
        yield Problem(
            f"with sampling.max_tokens = {completion} it exceeds engine.max_model_len = {context}",
            f"set it to {room} or less (0 means {room}), or raise engine.max_model_len to "
            f"{longest + completion}",
            "render.max_prompt_tokens",
            longest,
        )


def determinism_problems(settings: Settings) -> Iterator[Problem]:
    """Yield settings that conflict with `run.deterministic`."""
    if settings.run.deterministic:
        for reason in _differences_of_runs(settings):
            yield Problem(f"setting run.deterministic: {reason}")


def rerun_obstacles(settings: Settings) -> Iterator[str]:
    """Yield reasons why `tether rerun` could not repeat a run with these settings."""
    if settings.engine.name != "hf" or settings.services.pool:
        yield "only tokens of one engine 'hf' are generated again, token by token"
    if settings.engine.kv is not KvPolicy.RECOMPUTE:
        yield "with engine.kv 'keep' tokens depend on the KV cache of unrecorded versions"
    if settings.lora.rank or settings.trainer.routing_replay:
        yield "adapters (lora.rank) and recorded experts (trainer.routing_replay) are not generated again"
    if settings.trainer_ranks > 1:
        yield f"its trainer has {settings.trainer_ranks} ranks, and one makes it again"
    if not can_score_again(settings.reward):
        yield "judges and reward models (reward.verifiers) are not called again"
    if settings.sampling.keep_first:
        yield _FIRST


def _differences_of_runs(settings: Settings) -> Iterator[str]:
    """Yield reasons why two runs with these settings would differ."""
    invariant = ENGINES.having("batch_invariant")
    for name in engine_names(settings.engine, settings.services.pool):
        if name not in invariant:
            yield (
                f"tokens of engine {name!r} depend on concurrent requests, or the engine has no "
                f"per-request seeds; use {' or '.join(invariant)}"
            )
    if not settings.run.lockstep:
        yield from rerun_obstacles(settings)
        return
    if settings.services.pool:
        yield "engines of a services.pool differ in rounding, and any of them may get a group; remove it"
    if settings.bound.staleness_policy is not Policy.WAIT:
        yield (
            f"with bound.staleness_policy {str(settings.bound.staleness_policy)!r} the slowest groups "
            "decide what is trained; it must be 'wait'"
        )
    if settings.sampling.keep_first:
        yield _FIRST
    if settings.algorithm.filter_groups:
        yield "algorithm.filter_groups gives places to other prompts as soon as they are free; remove it"
    if settings.trainer.publish_every != 1:
        yield f"trainer.publish_every is {settings.trainer.publish_every}; it must be 1"
    if settings.colocated.enabled:
        yield "colocated.enabled lets trainer and engines take turns by time; remove that setting"
    if settings.engine.arguments.get("enable_prefix_caching") or "max_num_seqs" in settings.engine.arguments:
        yield (
            "engine.arguments decides which requests are computed together, or from a cache: leave out "
            "enable_prefix_caching and max_num_seqs"
        )
    if settings.engine.drafts != "off":
        yield "with engine.drafts the drafts decide how many random numbers a seed is used for; remove it"
