"""Runs `tether check`: finds what would keep a run from starting, without starting anything."""

from collections.abc import Sequence

from protocol.errors import SettingsError
from protocol.validation import WrongSettings
from services.preflight.check import check_run, describe_run
from services.preflight.endpoints import ledger_problems
from services.preflight.machine import check_directory
from services.settings.checks import settings_errors
from services.settings.hub import pin_names
from services.settings.load import compose_settings

Facts = dict[str, list[str]]
"""Answer of `tether check`: `problems`, each a sentence with setting, value and remedy, and `summary`, what
would start. One of them is empty."""


def check_configuration(config: str, overrides: Sequence[str]) -> Facts:
    """Check a settings file with overrides: first every setting by itself, then the run as a whole."""
    try:
        settings = compose_settings(config, overrides)
    except WrongSettings as error:
        return _refused(error.problems)
    except SettingsError as error:
        return _refused([str(error)])
    wrong = [str(error) for error in settings_errors(settings)]
    if wrong:
        return _refused(wrong)
    try:
        check_directory(settings.run_dir)  # names of the hub are pinned in it
        settings = pin_names(settings)
    except SettingsError as error:
        return _refused([str(error)])
    findings = check_run(settings, local=True)
    problems = [str(problem) for problem in (*findings.problems, *ledger_problems(settings))]
    if problems or findings.model is None or findings.source is None:
        return _refused(problems)
    return {"problems": [], "summary": describe_run(settings, findings.model, findings.source)}


def render_check(facts: Facts) -> str:
    """Return the answer as text: OK and the summary, or the number of problems and each of them."""
    if not (problems := facts["problems"]):
        return "\n".join(("OK", *facts["summary"]))
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    return "\n".join((count, *(f"- {text}" for text in problems)))


def _refused(problems: Sequence[str]) -> Facts:
    return {"problems": list(problems), "summary": []}
