"""Runs the user's algorithm, group filter, schedule, optimizer and engine once before a start.

`rewards.py` does the same with reward functions.
"""

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from protocol.choices import is_own
from reward.workers.group_scoring import primaries
from reward.workers.pool import ENVIRONMENT
from rollout.engines.registry import engine_class
from rollout.environments.registry import ENVIRONMENTS, EnvironmentEntry
from rollout.prompts.base import Prompt
from rollout.trajectory import pack_metadata
from services.preflight.problem import Problem, refusals
from services.settings.engine_pool import engine_names
from services.settings.evaluation import eval_engine
from services.settings.sections import Settings
from trainer.algorithms.registry import make_algorithm
from trainer.functional.learning_rate import learning_rate


def own_code_problems(settings: Settings, prompts: Sequence[Prompt]) -> Iterator[Problem]:
    """Yield a problem for each `MODULE:NAME` that cannot be loaded or fails in a trial.

    Rewards, environments, agents and prompt sources have separate checks.

    Args:
        prompts: the first prompts of the stream; empty if the stream cannot be read.
    """
    yield from refusals(_check_algorithm, settings)
    yield from refusals(_check_filter, settings, prompts)
    for check in (_check_schedule, _check_optimizer, _check_engines):
        yield from refusals(check, settings)


def _check_algorithm(settings: Settings) -> None:
    """Run the user's algorithm on a small synthetic batch."""
    if is_own(settings.algorithm.name):
        from trainer.step.probe import (
            probe_synthetic,  # imports torch, which built-in algorithms do not need here
        )

        probe_synthetic(make_algorithm(settings.algorithm), settings.sampling.kept_samples)


def _check_filter(settings: Settings, prompts: Sequence[Prompt]) -> None:
    """Call the user's filter with a synthetic group of the first prompt."""
    if settings.algorithm.group_filter:
        from trainer.data.group_filter import group_filter
        from trainer.step.probe import synthetic_groups

        keeps = group_filter(settings.algorithm)
        made = synthetic_groups(settings.sampling.kept_samples)[0]
        names = [settings.reward.verifiers[number].component for number in primaries(settings.reward)]
        if ENVIRONMENTS.get(settings.environment.name, EnvironmentEntry("")).gives_reward:
            names.append(ENVIRONMENT)
        for prompt in prompts[:1]:
            rollout = replace(made.rollout, prompt_text=prompt.text, metadata=pack_metadata(prompt))
            keeps(replace(made, rollout=rollout, components=dict.fromkeys(names, made.rewards)))


def _check_schedule(settings: Settings) -> None:
    """Query the user's schedule for the first and the last learning rate of the run."""
    if is_own(settings.optimizer.lr_decay_style):
        for made in (settings.optimizer.lr_warmup_steps, settings.run.steps * settings.trainer.updates - 1):
            learning_rate(settings.optimizer, made)


def _check_optimizer(settings: Settings) -> None:
    """Run the user's optimizer for two steps on a matrix and a vector."""
    if is_own(settings.optimizer.name):
        from trainer.optimizers.libraries import probe_optimizer

        probe_optimizer(settings.optimizer)


def _check_engines(settings: Settings) -> None:
    """Import each engine of the user: in `[engine]`, the pool and the evaluation."""
    pool = engine_names(settings.engine, settings.services.pool)
    for name in dict.fromkeys((settings.engine.name, *pool, eval_engine(settings).name)):
        if is_own(name):
            engine_class(name)
