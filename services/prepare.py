"""Prepares a run before its services start: `python -m services.prepare`.

For services that are started individually, for example as containers. `tether up` prepares runs itself.

Produces: the model, the run in the ledger, and RUN_DIR/settings.json, which the services read as
`TETHER_CONFIG`. Idempotent. Exit codes are those of a service: 0 ready, 1 failed, 2 wrong settings.
"""

import asyncio
import sys
from collections.abc import Callable, Sequence

from rollout.prompts.base import PromptSource
from rollout.prompts.registry import make_source
from services.ledger.interface import RunSpec
from services.ledger_recovery.reconcile import reconcile
from services.preflight.check import check_run
from services.preflight.problem import refuse
from services.run_record.end import explaining_full_disk, refuse_made_from_record
from services.runtime.errors import configure_logging, exit_with
from services.runtime.event_loop import run_loop
from services.runtime.run_copies import settings_of_fetched
from services.runtime.run_ledger import ledger_url, open_ledger
from services.runtime.start_run import start_or_resume
from services.settings.hub import pin_names, record_pins
from services.settings.load import load_settings, run_settings
from services.settings.resume import changes_since_last_start
from services.settings.sections import Settings
from trainer.random_model import build_scratch
from trainer.storage.checksums import check_model_files


def prepare(settings: Settings, *, local: bool = False) -> RunSpec:
    """Run all checks that precede the first service, then create a random model if configured.

    Args:
        settings: settings of the run, with hub names pinned to commits.
        local: whether all services run on this machine.

    Returns:
        The run's specification for the ledger.

    Raises:
        SettingsError: a check failed; no file was created.
    """
    changes_since_last_start(settings)
    findings = check_run(settings, local=local)
    refuse(findings.problems)
    return make_run(settings, findings.source)


def make_run(settings: Settings, source: PromptSource | None = None) -> RunSpec:
    """Create the random model if configured; return the run's specification for the ledger.

    Raises:
        SettingsError: the model or the prompts cannot be created, or a model file is damaged.
    """
    if settings.model.scratch is not None:
        build_scratch(settings.model.scratch, settings.model_dir)
    check_model_files(settings.model_dir)
    source = source or make_source(settings.prompts)
    bound = settings.bound
    return RunSpec(
        run=settings.run.name,
        fingerprint=source.fingerprint,
        prompts=source.size,
        steps=settings.run.steps,
        bound=bound.bound,
        max_attempts=bound.max_attempts,
        drop_share=bound.drop_share,
        drop_window=bound.drop_window,
    )


async def prepare_run(settings: Settings, compose: Callable[[], Settings]) -> Sequence[str]:
    """Create everything that the services of a run need.

    A run with an empty directory is first fetched from `run.remote`.

    Args:
        settings: settings of the run.
        compose: composes the settings again, after a fetch.

    Returns:
        Lines for the user: the bound in force, changes since the last start, durability of the ledger's
            server.

    Raises:
        SettingsError: a check failed or the disk is full; ledger and settings.json are unchanged.
    """
    refuse_made_from_record(settings.run_dir)
    ledger_url(settings)  # fails before a model is created, which takes time
    settings.run_dir.mkdir(parents=True, exist_ok=True)
    with explaining_full_disk(settings.run_dir):
        settings = await asyncio.to_thread(settings_of_fetched, settings, compose)
        pinned = await asyncio.to_thread(pin_names, settings)
        spec = await asyncio.to_thread(prepare, pinned)
    async with open_ledger(settings) as ledger:
        await reconcile(ledger, settings)
        lines = await start_or_resume(ledger, pinned, spec)
        record_pins(settings, pinned)
        return [*lines, ledger.durability]


def main() -> None:
    """Prepare the run described by `TETHER_CONFIG` and the other environment variables."""
    try:
        configure_logging("prepare")
        requested = load_settings()
        lines = run_loop(prepare_run(requested, load_settings))
        settings = run_settings(requested.run_dir)
    except KeyboardInterrupt:
        sys.exit(1)
    except Exception as error:
        exit_with(error, "tether prepare")
    for line in filter(None, lines):
        print(line, file=sys.stderr)
    print(
        f"run {settings.run.name} is ready in {settings.run_dir}: "
        f"{settings.run.steps} steps, model {settings.model_dir}"
    )


if __name__ == "__main__":
    main()
