"""Runs the user's algorithm, group filter, schedule, optimizer and engine once before a start.

`rewards.py` does the same with reward functions.
"""

from collections.abc import Callable, Iterator, Sequence

from protocol.choices import is_own
from rollout.engines.registry import engine_class
from services.preflight.problem import Problem, refusals
from services.settings.engine_pool import engine_names
from services.settings.evaluation import eval_engine
from services.settings.sections import Settings
from trainer.algorithms.registry import make_algorithm
from trainer.functional.learning_rate import learning_rate


def own_code_problems(settings: Settings) -> Iterator[Problem]:
    """Yield a problem for each `MODULE:NAME` that cannot be loaded or fails in a trial.

    Rewards, environments, agents and prompt sources have separate checks.
    """
    for check in CHECKS:
        yield from refusals(check, settings)


def _check_algorithm(settings: Settings) -> None:
    """Run the user's algorithm on a small synthetic batch."""
    if is_own(settings.algorithm.name):
        from trainer.step.probe import probe_made  # imports torch, which built-in algorithms do not need here

        probe_made(make_algorithm(settings.algorithm), settings.sampling.kept_samples)


def _check_filter(settings: Settings) -> None:
    """Call the user's filter with a synthetic group."""
    if settings.algorithm.group_filter:
        from trainer.data.group_filter import group_filter
        from trainer.step.probe import made_groups

        group_filter(settings.algorithm)(made_groups(settings.sampling.kept_samples)[0])


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


CHECKS: Sequence[Callable[[Settings], None]] = (
    _check_algorithm,
    _check_filter,
    _check_schedule,
    _check_optimizer,
    _check_engines,
)
"""Checks, one per kind of user code; each raises SettingsError."""
