"""Runs `tether check`: finds problems that would prevent a run from starting, without starting anything."""

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.errors import SettingsError
from protocol.validation import WrongSettings
from services.preflight.check import check_run, describe_run
from services.preflight.endpoints import ledger_problems
from services.preflight.machine import check_directory
from services.preflight.problem import refusals
from services.run_record.steps import FILE, read_last
from services.runtime.start_run import check_steps
from services.settings.checks import settings_errors
from services.settings.hub import pin_names
from services.settings.load import compose_settings, recorded_settings
from services.settings.resume import changes_since_last_start
from services.settings.sections import Settings


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """Result of `tether check`."""

    problems: Sequence[str]
    """A sentence per problem with setting, value and remedy; empty if the run can start."""
    summary: Sequence[str]
    """Description of the run; empty if there are problems."""


def check_configuration(config: str, overrides: Sequence[str]) -> CheckedRun:
    """Check a settings file with overrides: first each setting, then the whole run."""
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
        check_directory(settings.run_dir)  # `pin_names` reads commits from this directory
        settings = pin_names(settings)
    except SettingsError as error:
        return CheckedRun([str(error)], [])
    findings = check_run(settings, local=True)
    resumed = [*refusals(changes_since_last_start, settings), *refusals(_check_steps_made, settings)]
    found = (*resumed, *findings.problems, *ledger_problems(settings))
    problems = list(dict.fromkeys(map(str, found)))  # both of `resumed` read the settings of the last start
    if problems or findings.model is None or findings.source is None:
        return CheckedRun(problems, [])
    return CheckedRun(
        [], [*describe_run(settings, findings.model, findings.source), *_nothing_left(settings)]
    )


def _steps_made(settings: Settings) -> int:
    """Return the number of steps that the run in the directory has made, from its record; 0 for a new run."""
    return int(read_last(settings.run_dir / FILE).get("version", 0))


def _check_steps_made(settings: Settings) -> None:
    """Reject fewer steps than the run has made, as its start would. Raises SettingsError."""
    if last := recorded_settings(settings.run_dir):
        check_steps(settings.run.steps, _steps_made(settings), last.run.steps)


def _nothing_left(settings: Settings) -> list[str]:
    """Return a line if the run has made all its steps."""
    if settings.run.steps != _steps_made(settings):
        return []
    return [f"done     the run has made all {settings.run.steps:,} steps: set run.steps higher to train more"]


def render_check(result: CheckedRun) -> str:
    """Format the result: OK and the summary, or the number of problems and each problem."""
    if not result.problems:
        return "\n".join(("OK", *result.summary))
    count = len(result.problems)
    return "\n".join(
        (f"{count} problem{'s' if count > 1 else ''}", *(f"- {text}" for text in result.problems))
    )
