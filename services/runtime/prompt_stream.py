"""Checks that a process reads the prompts of its run: group g is prompt g of one stream everywhere.

The ledger stores the fingerprint of the stream. Each process reads the prompts itself, perhaps on another
host and long after the run's start, so it compares its fingerprint.
"""

from protocol.errors import SettingsError
from rollout.prompts.base import PromptConfig, PromptSource
from services.runtime.process import Process
from services.runtime.run_ledger import status_if_created

POLL_S = 0.5
"""Seconds between two queries whether the ledger has the run."""


async def check_stream(process: Process, source: PromptSource) -> bool:
    """Check that a process has the prompts of its run; wait until the ledger has the run.

    Returns:
        False if the process was stopped before the run existed.

    Raises:
        SettingsError: the run was created with other prompts; the message has both fingerprints.
    """
    recorded = await wait_for_run(process)
    if recorded is None:
        return False
    settings = process.settings
    check_fingerprint(
        settings.prompts,
        source.fingerprint,
        recorded,
        "give this host the prompts that the run was started with, or start a new run in another directory "
        f"than {settings.run_dir}",
    )
    return True


async def wait_for_run(process: Process) -> str | None:
    """Wait until the ledger has the run; return its prompt fingerprint, or None if stopped first.

    `tether up` or `services.prepare` creates the run; the ingest rebuilds a run that the server has lost.
    """
    status = await status_if_created(process.ledger)
    if status is None:
        with process.waiting("the run in the ledger"):
            while status is None and not await process.stopped_within(POLL_S):
                status = await status_if_created(process.ledger)
    return None if status is None else status.fingerprint


def check_fingerprint(config: PromptConfig, present: str, recorded: str, remedy: str) -> None:
    """Reject prompts that differ from the run's.

    Args:
        config: section `[prompts]`.
        present: fingerprint of the current prompts.
        recorded: fingerprint with which the run was created.
        remedy: suggested action, the end of the message.

    Raises:
        SettingsError: the fingerprints differ; the message has both fingerprints and the setting of the
        prompts' place.
    """
    if present != recorded:
        raise SettingsError(
            f"setting {_place(config)} have the fingerprint {present}, those of the run {recorded}: {remedy}"
        )


def _place(config: PromptConfig) -> str:
    """Return the setting with the location of the prompts, and a description of them."""
    if config.mixture:
        return f"prompts.mixture: the prompts of {', '.join(entry.name for entry in config.mixture)}"
    if config.path:
        return f"prompts.path: the prompts in {config.path}"
    return f"prompts.source: the prompts that {config.source} generates here"
