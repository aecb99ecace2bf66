"""Defines the `tether` command.

If the user must change something, a command ends with a line that says what, and exit code 2. Commands import
their modules when they run, so that `tether --help` and `tether status` are fast.
"""

import functools
import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer

from protocol.errors import SettingsError, TetherError
from protocol.host.prctl import keep_private
from services.migration.convert import import_config
from services.runtime.errors import configure_logging, end_command
from services.serving.command import serve
from services.settings.sources import to_toml
from services.tools.push import push
from services.tools.recorded.commands import AsJson, bisect, replay, rerun

if TYPE_CHECKING:
    from services.settings.sections import Settings

T = TypeVar("T")
app = typer.Typer(
    help="Reinforcement-learning post-training of language models as independent services.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
RunDir = Annotated[Path, typer.Argument(metavar="D", help="run directory, such as runs/demo")]
Config = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="settings file, such as deploy/configs/demo.toml")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="override a setting; may be repeated")
]


@app.command()
def init(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="new or empty directory")],
) -> None:
    """Write a small run to start from: settings, a reward function of your own, prompts."""
    from services.tools.new_run import write_run

    files = ", ".join(write_run(directory))
    print(f"wrote {files}; next: tether check {shlex.quote(str(directory / 'config.toml'))}")


Steps = Annotated[int | None, typer.Option(help="stop after so many steps")]
NewRunDir = Annotated[Path | None, typer.Option(help="where the run writes; continues what is there")]
Rollouts = Annotated[int | None, typer.Option(help="rollout workers")]
Rewards = Annotated[int | None, typer.Option(help="reward workers")]


@app.command()
def up(
    config: Config,
    steps: Steps = None,
    run_dir: NewRunDir = None,
    set_: Overrides = None,
    rollouts: Rollouts = None,
    rewards: Rewards = None,
) -> None:
    """Run all services on this machine until the steps are done or Ctrl-C."""
    from services.launcher.live_progress import open_progress
    from services.launcher.supervisor import run_up
    from services.runtime.event_loop import run_loop
    from services.settings.load import load_settings, run_settings

    overrides = _overrides(set_, steps, run_dir, rollouts, rewards)
    configure_logging("up")
    compose = functools.partial(load_settings, str(config), overrides)
    settings = compose()
    progress = open_progress(settings.run.name, settings.run_dir, settings.run.steps)
    outcome = run_loop(run_up(settings, progress, compose))
    if not outcome.interrupted and outcome.version < outcome.steps:
        reason = "the prompts ran out" if outcome.exhausted else "the run was drained"
        progress.note(f"{reason} after {outcome.version} of {outcome.steps} steps")
    if settings.eval.at_end and not outcome.interrupted:
        progress.note("scoring the first and last model on held-out prompts; engine output: logs/eval.log")
        _print_eval(run_settings(settings.run_dir), [])


@app.command()
def check(
    config: Config,
    steps: Steps = None,
    run_dir: NewRunDir = None,
    set_: Overrides = None,
    rollouts: Rollouts = None,
    rewards: Rewards = None,
    as_json: AsJson = False,
) -> None:
    """Find all problems that would prevent a run from starting, without starting it; exit code 2 if any."""
    from services.tools.check import check_configuration, render_check

    result = check_configuration(str(config), _overrides(set_, steps, run_dir, rollouts, rewards))
    _show(
        {"problems": list(result.problems), "summary": list(result.summary)},
        as_json,
        lambda _: render_check(result),
    )
    if result.problems:
        raise typer.Exit(2)


@app.command()
def size(
    config: Config,
    gpus: Annotated[int, typer.Option("--gpus", min=1, max=4096, metavar="N", help="GPUs of the trainer")],
    gpu_memory: Annotated[
        float, typer.Option("--gpu-memory", min=1, max=4096, metavar="GIB", help="memory of one GPU, GiB")
    ],
    set_: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Compute which layouts of the trainer fit, and how many samples an engine holds; needs no GPU."""
    from services.tools.size import render_sizes, size_run

    sizes = size_run(str(config), set_ or [], gpus=gpus, gpu_gb=gpu_memory)
    _show(sizes.as_dict(), as_json, lambda _: render_sizes(sizes))


@app.command("check-model")
def check_model(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="has config.json and safetensors")],
    tp: Annotated[int, typer.Option("--tp", min=1, metavar="N", help="tensor ranks")] = 1,
    pp: Annotated[int, typer.Option("--pp", min=1, metavar="N", help="pipeline stages")] = 1,
    vpp: Annotated[int, typer.Option("--vpp", min=1, metavar="N", help="chunks of a pipeline stage")] = 1,
    ep: Annotated[int, typer.Option("--ep", min=1, metavar="N", help="ranks with different experts")] = 1,
    cp: Annotated[int, typer.Option("--cp", min=1, metavar="N", help="ranks that share sequences")] = 1,
    etp: Annotated[int, typer.Option("--etp", min=1, metavar="N", help="ranks that share an expert")] = 1,
    backend: Annotated[Literal["megatron", "fsdp"], typer.Option(help="fsdp: on one rank")] = "megatron",
    as_json: AsJson = False,
) -> None:
    """Load a model on the CPU, compare logits and export with Hugging Face's; exit code 1 if they differ."""
    import services.tools.check_model as tool

    found = tool.check_model(directory, tool.layout_of(tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, etp=etp), backend)
    _show(found.as_dict(), as_json, lambda _: tool.render_checked_model(found))
    if not found.works:
        raise typer.Exit(1)


@app.command("check-algorithm")
def check_algorithm(
    name: Annotated[str, typer.Argument(metavar="MODULE:NAME", help="your algorithm, or a built-in one")],
    run_dir: Annotated[
        Path | None, typer.Option("--run", metavar="D", help="run with the batch; else one is made")
    ] = None,
    step: Annotated[int | None, typer.Option(metavar="K", help="the run's step; by default its last")] = None,
    like: Annotated[str, typer.Option(metavar="NAME", help="algorithm to compare with")] = "",
    set_: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Run an algorithm on a batch, without a model; exit code 2 if it fails, with file and line."""
    from services.tools.check_algorithm import check_algorithm as run_check
    from services.tools.check_algorithm import render_checked_algorithm

    facts = run_check(name, run_dir=run_dir, step=step, like=like, overrides=set_ or [])
    _show(facts, as_json, render_checked_algorithm)


@app.command()
def status(run_dir: RunDir, as_json: AsJson = False) -> None:
    """Show processes, engines and groups of a run; after its end, how the run ended, from its files."""
    from services.run_record.evaluations import evaluation_facts, render_facts
    from services.tools.run_commands import read_status, render_run_status

    facts = read_status(run_dir) | {"evaluation": evaluation_facts(run_dir)}
    _show(facts, as_json, lambda facts: render_run_status(facts) + render_facts(facts["evaluation"]))


@app.command()
def monitor(
    run_dir: RunDir,
    other: Annotated[Path | None, typer.Argument(metavar="D2", help="run laid over the first")] = None,
    host: Annotated[
        str | None, typer.Option(help="address to serve on; 127.0.0.1 by default, others need a key")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="port to serve on; any free one by default")
    ] = None,
) -> None:
    """Serve the web page of a current or ended run, until Ctrl-C."""
    from services.monitor import run_monitor
    from services.settings.load import run_settings

    settings = run_settings(run_dir, ["ledger.retry_s=0", "ledger.timeout_s=3"])
    run_monitor(settings, host, port, None if other is None else run_settings(other).run_dir)


@app.command()
def verify(
    run_dir: RunDir,
    files: Annotated[bool, typer.Option("--files", help="also compare files with their checksums")] = False,
    numerics: Annotated[bool, typer.Option("--numerics", help="also compute records again")] = False,
    as_json: AsJson = False,
) -> None:
    """Check a run's log and calls against lifecycle and bound; exit code 1 if anything is wrong."""
    from services.tools.verification import render_verification, verify_run

    facts = verify_run(run_dir, files=files, numerics=numerics)
    _show(facts, as_json, render_verification)
    if facts["violations"] or facts.get("damaged") or facts.get("alarms"):
        raise typer.Exit(1)


@app.command()
def trace(
    run_dir: RunDir,
    group: Annotated[int | None, typer.Argument(help="number of the group")] = None,
    perfetto: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write the whole run for ui.perfetto.dev instead")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the history of one group with times, and the model's text, from the run's files alone."""
    if perfetto is not None:
        if group is not None:
            raise SettingsError(f"--perfetto writes the whole run: give it without the group {group}")
        from services.tracking.trace_records import write_perfetto

        print(f"wrote {write_perfetto(run_dir, perfetto):,} records; open {perfetto} in ui.perfetto.dev")
        return
    if group is None:
        raise SettingsError("give the number of a GROUP, or --perfetto FILE for the whole run")

    from services.tools.samples import trace_group

    facts, render = trace_group(run_dir, group)
    _show(facts, as_json, lambda _: render())


@app.command()
def samples(
    run_dir: RunDir,
    step: Annotated[int | None, typer.Option(help="that trained them; by default the newest")] = None,
    group: Annotated[
        int | None, typer.Option(help="only this prompt group, also before it is trained")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="samples to show at most")] = 8,
    as_json: AsJson = False,
) -> None:
    """Show prompts, completions and rewards of a current or ended run, from its files alone."""
    from services.run_record.samples import find_samples
    from services.tools.samples import render_samples

    _show(find_samples(run_dir, step, group, limit), as_json, render_samples)


@app.command("pass-rates")
def pass_rates(
    run_dir: RunDir,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="JSON Lines file to write")],
    as_json: AsJson = False,
) -> None:
    """Write a run's prompts with their last mean rewards, for prompts.min_pass_rate and others."""
    from services.settings.load import run_settings
    from services.tools.pass_rates import render_pass_rates, write_pass_rates

    _show(write_pass_rates(run_settings(run_dir), out), as_json, render_pass_rates)


@app.command("set", context_settings={"ignore_unknown_options": True})  # -1 is a value
def set_value(
    run_dir: RunDir,
    name: Annotated[str, typer.Argument(help="max-staleness, groups-per-step or staleness-policy")],
    value: str,
) -> None:
    """Change the bound of a running run. The new bound takes effect as soon as rule F allows it."""
    from services.tools.run_commands import change_bound

    print(change_bound(run_dir, name, value))


@app.command()
def drain(
    run_dir: RunDir, off: Annotated[bool, typer.Option("--off", help="grant leases again")] = False
) -> None:
    """End a run early: grant no more leases, train the groups in flight (the last step may be short)."""
    from services.tools.run_commands import drain_run

    print(drain_run(run_dir, off))


@app.command()
def scale(
    run_dir: RunDir,
    counts: Annotated[
        list[str], typer.Argument(metavar="rollouts=N|rewards=N ...", help="number of workers")
    ],
) -> None:
    """Change the numbers of rollout and reward workers of a running `tether up`; surplus workers drain."""
    from services.launcher.scaling import parse_counts, scale_run
    from services.tools.run_commands import refuse_if_over

    wanted = parse_counts(counts)
    if (run_dir / "settings.json").is_file():
        refuse_if_over(run_dir, "scale")
    print(scale_run(run_dir, wanted))


@app.command()
def keys(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="directory, such as of bus.curve_dir")],
    endpoint: Annotated[list[str] | None, typer.Option(help="name or address for a certificate")] = None,
) -> None:
    """Create the CURVE keys that services need off loopback, or a certificate for the harness endpoint."""
    from services.tools.keys import make_keys

    print(make_keys(directory, endpoint or []))


@app.command()
def track(run_dir: RunDir) -> None:
    """Send the points of a finished run that the libraries of `tracking.kind` lack."""
    from services.settings.load import run_settings
    from services.tracking.service import track_rest

    configure_logging("track")
    settings = run_settings(run_dir)
    for kind, state in track_rest(settings).items():
        print(f"{kind}: {state.problem or f'all {state.sent} points were sent'}; {state.url}")


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
    from services.settings.load import run_settings

    overrides = _as_overrides({"eval.prompts": prompts, "eval.samples": samples})
    configure_logging("eval")
    _print_eval(run_settings(run_dir, overrides), checkpoint or [], as_json)


for command in (bisect, push, replay, rerun, serve):
    app.command()(command)
app.command("import-config")(import_config)


def _overrides(
    set_: list[str] | None,
    steps: int | None,
    run_dir: Path | None,
    rollouts: int | None,
    rewards: int | None,
) -> list[str]:
    """Return the overrides of a settings file from command line options."""
    counts = {"services.rollouts": rollouts, "services.rewards": rewards}
    return [*(set_ or []), *_as_overrides({"run.steps": steps, "run.dir": run_dir, **counts})]


def _as_overrides(options: Mapping[str, object]) -> list[str]:
    """Convert the given options to overrides of their settings."""
    given = {name: value for name, value in options.items() if value is not None}
    return [f"{name}={to_toml(value)}" for name, value in given.items()]


def _print_eval(settings: "Settings", checkpoints: list[Path], as_json: bool = False) -> None:
    from services.runtime.event_loop import exiting_without_threads
    from services.tools.evaluate import render_scores, score_run

    with exiting_without_threads():
        _show(score_run(settings, checkpoints), as_json, render_scores)


def _show(facts: T, as_json: bool, render: Callable[[T], str]) -> None:
    from services.observability.printable import printable

    print(json.dumps(facts, indent=2) if as_json else printable(render(facts)), flush=True)


def main() -> None:
    """Run `tether`; exit with 1 for a failure, 2 if the user must change something."""
    keep_private()
    try:
        app()
    except (TetherError, ExceptionGroup, OSError) as error:
        end_command(error)


if __name__ == "__main__":
    main()
