"""Defines `tether replay`, which makes a recorded step again, and `tether bisect`, which compares two runs.

What they use is imported when they run, so that `tether --help` answers at once.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


def replay(
    run_dir: Annotated[Path, typer.Argument(metavar="D", help="run directory, such as runs/demo")],
    step: Annotated[int, typer.Option(help="the step that started from version K", metavar="K")],
    train: Annotated[
        bool, typer.Option("--train", help="repeat the steps from the nearest checkpoint, compare the loss")
    ] = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="override a setting; may be repeated")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Rebuild the batch of a past step from log and archive; exit code 1 if it is not what was trained."""
    from services.observability.printable import printable
    from services.settings.load import run_settings
    from services.tools.replay import render_replay, replay_step

    facts = replay_step(run_settings(run_dir), step, train=train, overrides=set_ or [])
    print(json.dumps(facts, indent=2) if as_json else printable(render_replay(facts)), flush=True)
    if not facts["equal"] or not facts.get("train", facts)["equal"]:
        raise typer.Exit(1)


def bisect(
    first: Annotated[Path, typer.Argument(metavar="A", help="run directory, such as runs/demo")],
    second: Annotated[Path, typer.Argument(metavar="B", help="another run directory")],
    as_json: AsJson = False,
) -> None:
    """Find the first step, group, token or tensor in which two runs differ; exit code 1 if there is one."""
    from services.observability.printable import printable
    from services.runtime.errors import configure_logging
    from services.tools.recorded.comparison import compare_runs, render_comparison

    configure_logging("bisect")
    facts = compare_runs(first, second)
    text = printable(render_comparison(facts, (first, second)))
    print(json.dumps(facts, indent=2) if as_json else text, flush=True)
    raise typer.Exit(facts["difference"] is not None)
