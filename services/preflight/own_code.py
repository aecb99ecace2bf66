"""Loads the code of the user that a run names, and tries it, before anything starts."""

from collections.abc import Callable, Iterator, Sequence

from protocol.choices import is_own
from protocol.errors import SettingsError
from services.preflight.problem import Problem
from services.settings.sections import Settings
from trainer.algorithms.registry import make_algorithm


def own_code_problems(settings: Settings) -> Iterator[Problem]:
    """Yield the problem of each `MODULE:NAME` that cannot be loaded, or fails when it is tried.

    Rewards, environments, agents and prompt sources are made by checks of their own.
    """
    for check in CHECKS:
        try:
            check(settings)
        except SettingsError as error:
            yield Problem(str(error))


def _check_algorithm(settings: Settings) -> None:
    """Run an algorithm of the user on a small batch that is made up."""
    if is_own(settings.algorithm.name):
        from trainer.step.probe import probe_made  # torch, which built-in algorithms do not need here

        probe_made(make_algorithm(settings.algorithm), settings.sampling.samples_per_prompt)


CHECKS: Sequence[Callable[[Settings], None]] = (_check_algorithm,)
"""Checks of one kind of code each; they raise SettingsError."""
