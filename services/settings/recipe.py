"""Checks the settings of a recipe against each other."""

from protocol.errors import SettingsError
from services.settings.sections import Settings


def check_recipe(settings: Settings) -> None:
    """Check what the algorithm, its corrections and the updates of a step require of each other.

    Raises:
        SettingsError: names the first setting that does not fit, and what it has to be.
    """
    for is_wrong, problem in _problems(settings):
        if is_wrong:
            raise SettingsError(f"setting {problem}")


def _problems(settings: Settings) -> tuple[tuple[bool, str], ...]:
    algorithm, trainer = settings.algorithm, settings.trainer
    samples = settings.bound.groups_per_step * settings.sampling.samples_per_prompt
    return (
        (
            trainer.num_mini_batches > samples,
            f"trainer.num_mini_batches: {trainer.num_mini_batches} mini-batches for the {samples} samples of "
            "a step (bound.groups_per_step x sampling.samples_per_prompt); give at most so many",
        ),
        (
            algorithm.name == "m2po" and not algorithm.second_moment_threshold,
            "algorithm.second_moment_threshold: 'm2po' clips nothing, and without a threshold nothing bounds "
            "a step; set it above 0, such as 0.04",
        ),
        (
            algorithm.proximal_policy != "start" and not trainer.recompute_logprobs,
            f"algorithm.proximal_policy: {algorithm.proximal_policy!r} is for the decoupled objective; turn "
            "trainer.recompute_logprobs on, or leave it out",
        ),
        (
            algorithm.entropy_target > 0 and not 0 <= algorithm.entropy_coef <= algorithm.entropy_coef_max,
            f"algorithm.entropy_coef: {algorithm.entropy_coef:g} is not between 0 and entropy_coef_max, "
            f"{algorithm.entropy_coef_max:g}, where entropy_target keeps it",
        ),
    )
