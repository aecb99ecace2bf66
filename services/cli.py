"""The `tether` command. Every command ends with one clear line and exit code 2 where the user has to change
something."""

import asyncio
import dataclasses
import json
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from protocol.errors import EngineError, Reason, Refused, SettingsError, TetherError
from protocol.topics import Role
from services.runtime.errors import configure_logging, describe_error
from services.runtime.run_ledger import open_ledger
from services.settings.load import load_settings, run_settings
from services.settings.sections import Settings

T = TypeVar("T")
app = typer.Typer(
    help="Reinforcement-learning post-training of language models as independent services.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
RunDir = Annotated[Path, typer.Argument(metavar="D", help="run directory, such as runs/demo")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


@app.command()
def up(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="settings file, such as deploy/configs/demo.toml")
    ],
    steps: Annotated[int | None, typer.Option(help="stop after so many steps")] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="where the run writes; continues what is there")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="override a setting; may be repeated")
    ] = None,
    rollouts: Annotated[int | None, typer.Option(help="rollout workers")] = None,
    rewards: Annotated[int | None, typer.Option(help="reward workers")] = None,
) -> None:
    """Run all services on this machine until the steps are done or Ctrl-C."""
    from services.launcher.supervisor import run_up
    from services.observability.progress import Progress

    overrides = list(set_ or [])
    for dotted, value in (
        ("run.steps", steps),
        ("run.dir", run_dir),
        ("services.rollouts", rollouts),
        ("services.rewards", rewards),
    ):
        if value is not None:
            overrides.append(f"{dotted}={json.dumps(str(value)) if isinstance(value, Path) else value}")
    configure_logging("up")
    settings = load_settings(str(config), overrides)
    progress = Progress(settings.run_dir, settings.run.steps)
    progress.note(
        f"run {settings.run.name} in {settings.run_dir}: {settings.run.steps} steps, "
        f"E={settings.bound.max_staleness}, B={settings.bound.groups_per_step}, {settings.bound.staleness_policy}"
    )
    outcome = asyncio.run(run_up(settings, progress))
    if settings.eval.at_end and not outcome.interrupted:
        progress.note(
            "scoring the first model and the last on held-out prompts; the engine's own words are in logs/eval.log"
        )
        _print_eval(settings, [])
    if not outcome.interrupted and outcome.version < outcome.steps:
        why = "the prompts ran out" if outcome.exhausted else "the run was drained"
        progress.note(f"{why} after {outcome.version} of {outcome.steps} steps")


@app.command()
def status(run_dir: RunDir, as_json: AsJson = False) -> None:
    """Show processes, engines and groups of a run."""
    from services.observability.status import collect_status, render_status

    facts = _with_ledger(run_dir, collect_status)
    print(json.dumps(facts, indent=2) if as_json else render_status(facts))


@app.command()
def verify(run_dir: RunDir, as_json: AsJson = False) -> None:
    """Check a run's audit log against the lifecycle and the bound; exit code 1 if anything is wrong."""
    from services.ledger.verify.verifier import verify as verify_log

    path = run_dir / "audit.jsonl"
    if not path.is_file():
        raise SettingsError(f"no audit log {path}: give the directory of a run, such as runs/demo")
    result = verify_log(path)
    facts = dataclasses.asdict(result)
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        print(
            "  ".join(f"{key} {value}" for key, value in facts.items() if key != "violations")
            + f"  violations {len(result.violations)}"
        )
        for violation in result.violations[:50]:
            print(f"violation: {violation}")
    if result.violations:
        raise typer.Exit(1)


@app.command()
def replay(
    run_dir: RunDir,
    step: Annotated[int, typer.Option(help="the step that started from version K", metavar="K")],
    train: Annotated[
        bool,
        typer.Option("--train", help="repeat the steps from the nearest checkpoint and compare the loss"),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Build the batch of a past step again, bit for bit, from log and archive; exit code 1 if it is not what
    was trained."""
    from services.tools.replay import render_replay, replay_step

    facts = replay_step(run_settings(run_dir), step, train=train)
    print(json.dumps(facts, indent=2) if as_json else render_replay(facts))
    if not facts["equal"] or not facts.get("train", facts)["equal"]:
        raise typer.Exit(1)


@app.command()
def trace(
    run_dir: RunDir,
    group: Annotated[int, typer.Argument(help="number of the group")],
    as_json: AsJson = False,
) -> None:
    """Show one group's life with times, from the event log alone."""
    from services.ledger.event_log.archiver import FILE
    from services.ledger.event_log.reader import read_events
    from services.ledger.event_log.trace import render_trace
    from services.ledger.event_log.trace import trace as trace_group

    moments = trace_group(read_events(run_dir / FILE), group)
    if not moments:
        raise SettingsError(
            f"group {group} is not in the log of {run_dir}: it was never leased, or the log is not archived so far yet"
        )
    print(
        json.dumps([dataclasses.asdict(moment) for moment in moments], indent=2)
        if as_json
        else render_trace(group, moments)
    )


@app.command("set")
def set_value(
    run_dir: RunDir,
    name: Annotated[str, typer.Argument(help="max-staleness, groups-per-step or staleness-policy")],
    value: str,
) -> None:
    """Change the bound of a run while it is on. It takes effect at the first moment rule F holds with it."""
    from protocol.staleness import Policy

    parsers: dict[str, tuple[str, Callable[[str], Any]]] = {
        "max-staleness": ("max_staleness", _at_least(0)),
        "groups-per-step": ("groups_per_step", _at_least(1)),
        "staleness-policy": ("policy", Policy),
    }
    if name not in parsers:
        raise SettingsError(f"{name!r} cannot be set while a run is on; choose one of {', '.join(parsers)}")
    key, parse = parsers[name]
    try:
        parsed = parse(value)
    except ValueError as error:
        raise SettingsError(f"{name} {value!r}: {error}") from None
    pending = _change_ledger(run_dir, lambda ledger: ledger.set_bound(**{key: parsed}))
    print(f"{name} {value}: {'pending until rule F holds with it' if pending else 'in force'}")


@app.command()
def drain(
    run_dir: RunDir, off: Annotated[bool, typer.Option("--off", help="grant leases again")] = False
) -> None:
    """End a run early: no more leases, what is in flight is trained (the last step may be short), then the
    trainer is done."""
    _change_ledger(run_dir, lambda ledger: ledger.drain(not off))
    print(
        "leases are granted again"
        if off
        else "draining: no more leases are granted; the run ends with what is in flight"
    )


@app.command()
def scale(
    run_dir: RunDir,
    counts: Annotated[
        list[str], typer.Argument(metavar="rollouts=N|rewards=N ...", help="how many there are to be")
    ],
) -> None:
    """Change how many rollout and reward workers a running `tether up` keeps. Workers that are too many hand
    back what they hold."""
    from services.launcher.scaling import is_up, parse_counts, request_scale
    from services.settings.checks import check_workers

    wanted = parse_counts(counts)
    if is_up(run_dir):
        check_workers(run_settings(run_dir).weights, wanted.get(Role.ROLLOUT, 0))
    request_scale(run_dir, wanted)
    print(", ".join(f"{role}s {count}" for role, count in wanted.items()))


@app.command()
def keys(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="directory that services read as bus.curve_dir")
    ],
) -> None:
    """Make the CURVE keys that services need off loopback. A directory that has keys already is refused."""
    from services.bus.curve import create_keys

    create_keys(directory)
    print(f"keys are in {directory}; set bus.curve_dir to it on every host")


@app.command("eval")
def evaluate(
    run_dir: RunDir,
    checkpoint: Annotated[
        list[Path] | None,
        typer.Option(help="model directory to score; by default the initial model and the newest checkpoint"),
    ] = None,
    prompts: Annotated[int | None, typer.Option(help="held-out prompts")] = None,
    samples: Annotated[int | None, typer.Option(help="sampled answers for each prompt; 0 for none")] = None,
    as_json: AsJson = False,
) -> None:
    """Score models on prompts that were never trained on: greedy, sampled, and the best constant answer."""
    overrides = [
        f"eval.{key}={value}"
        for key, value in (("prompts", prompts), ("samples", samples))
        if value is not None
    ]
    configure_logging("eval")
    _print_eval(run_settings(run_dir, overrides), checkpoint or [], as_json)


def _print_eval(settings: Settings, checkpoints: list[Path], as_json: bool = False) -> None:
    from services.observability.redirect_output import redirect_output

    log = settings.run_dir / "logs/eval.log"
    try:
        with redirect_output(log):
            from services.tools.evaluate import evaluate_run, render_scores

            scores = asyncio.run(evaluate_run(settings, checkpoints))
    except EngineError:
        print(f"tether: the engine's own words are in {log}", file=sys.stderr)
        raise
    print(json.dumps(scores, indent=2) if as_json else render_scores(scores), flush=True)


def _with_ledger(run_dir: Path, call: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
    settings = run_settings(run_dir, ["ledger.retry_s=0", "ledger.timeout_s=3"])

    async def body() -> T:
        async with open_ledger(settings) as ledger:
            return await call(ledger)

    try:
        return asyncio.run(body())
    except Refused as refusal:
        if refusal.reason is Reason.NO_RUN:
            raise SettingsError(f"the ledger knows no run {settings.run.name!r}: was it started?") from None
        raise


def _change_ledger(run_dir: Path, call: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
    """As `_with_ledger`, but not on a server that may have lost writes and was not looked at yet."""

    async def guarded(ledger: Any) -> T:
        await ledger.guard()
        return await call(ledger)

    return _with_ledger(run_dir, guarded)


def _at_least(smallest: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if value < smallest:
            raise ValueError(f"must be at least {smallest}")
        return value

    return parse


def main() -> None:
    """Entry point of `tether`."""
    try:
        app()
    except (TetherError, ExceptionGroup) as error:
        line, code = describe_error(error)
        print(f"tether: {line}", file=sys.stderr)
        sys.exit(code)


if __name__ == "__main__":
    main()
