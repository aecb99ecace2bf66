"""Defines `tether replay` and `tether rerun`, which repeat recorded steps, and `tether bisect`.

The commands import their modules when they run, so that `tether --help` is fast.
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
    """Rebuild the batch of a past step from log and archive; exit code 1 unless it equals the trained one."""
    from services.observability.printable import printable
    from services.settings.load import run_settings
    from services.tools.replay import render_replay, replay_step

    facts = replay_step(run_settings(run_dir), step, train=train, overrides=set_ or [])
    print(json.dumps(facts, indent=2) if as_json else printable(render_replay(facts)), flush=True)
    if not facts["equal"] or not facts.get("train", facts)["equal"]:
        raise typer.Exit(1)


def rerun(
    run_dir: Annotated[Path, typer.Argument(metavar="D", help="run directory, such as runs/demo")],
    to: Annotated[int | None, typer.Option(help="last version that is made again", metavar="K")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A.B=C", help="fork at K: train the rest of the record so"),
    ] = None,
    target: Annotated[
        Path | None, typer.Option("--run-dir", metavar="R", help="the new run directory; D-rerun, or D-fork")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Generate and train a recorded run again, token by token; exit code 1 if the weights differ."""
    from services.observability.printable import printable
    from services.runtime.errors import configure_logging
    from services.settings.load import run_settings
    from services.tools.recorded.rerun import render_rerun, rerun

    configure_logging("rerun")
    directory = target or run_dir.with_name(f"{run_dir.name}-{'fork' if set_ else 'rerun'}")
    facts = rerun(run_settings(run_dir), to, directory, set_ or [])
    print(json.dumps(facts, indent=2) if as_json else printable(render_rerun(facts)), flush=True)
    raise typer.Exit(facts["equal"] != facts["steps"])


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
