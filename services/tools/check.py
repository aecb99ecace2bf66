"""Runs `tether check`: finds what would keep a run from starting, without starting anything."""

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.errors import SettingsError
from protocol.validation import WrongSettings
from services.preflight.check import check_run, describe_run
from services.preflight.endpoints import ledger_problems
from services.preflight.machine import check_directory
from services.preflight.problem import refusals
from services.settings.checks import settings_errors
from services.settings.hub import pin_names
from services.settings.load import compose_settings
from services.settings.resume import changes_since_last_start


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """Answer of `tether check`."""

    problems: Sequence[str]
    """Each a sentence with setting, value and remedy; empty if the run can start."""
    summary: Sequence[str]
    """What would start; empty if there are problems."""


def check_configuration(config: str, overrides: Sequence[str]) -> CheckedRun:
    """Check a settings file with overrides: first every setting by itself, then the run as a whole."""
    try:
        settings = compose_settings(config, overrides)
    except WrongSettings as error:
        return CheckedRun(error.problems, [])
    except SettingsError as error:
        return CheckedRun([str(error)], [])
    wrong = [str(error) for error in settings_errors(settings)]
    if wrong:
        return CheckedRun(wrong, [])
    try:
        check_directory(settings.run_dir)  # names of the hub are pinned in it
        settings = pin_names(settings)
    except SettingsError as error:
        return CheckedRun([str(error)], [])
    findings = check_run(settings, local=True)
    resumed = refusals(changes_since_last_start, settings)
    problems = [str(problem) for problem in (*resumed, *findings.problems, *ledger_problems(settings))]
    if problems or findings.model is None or findings.source is None:
        return CheckedRun(problems, [])
    return CheckedRun([], describe_run(settings, findings.model, findings.source))


def render_check(result: CheckedRun) -> str:
    """Return the answer as text: OK and the summary, or the number of problems and each of them."""
    if not result.problems:
        return "\n".join(("OK", *result.summary))
    count = len(result.problems)
    return "\n".join(
        (f"{count} problem{'s' if count > 1 else ''}", *(f"- {text}" for text in result.problems))
    )
