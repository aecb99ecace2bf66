"""Finds and opens the ledger of a run from its settings, and queries whether it has the run."""

import contextlib
from collections.abc import AsyncIterator

from protocol.errors import Reason, Refused, SettingsError
from services.ledger.embedded_server import read_endpoint
from services.ledger.interface import Ledger, LedgerStatus
from services.ledger.redis.ledger import RedisLedger
from services.ledger.redis.url import complete_url
from services.settings.sections import Settings


def ledger_url(settings: Settings) -> str:
    """Return the URL of the run's ledger: configured, or of the embedded server in the run directory.

    Raises:
        SettingsError: there is neither; the message suggests an action.
    """
    config = settings.ledger
    if config.url:
        return complete_url(config.url, config.password_file, config.ca_file)
    url = read_endpoint(settings.run_dir / "ledger")
    if url is None:
        raise SettingsError(
            "no ledger: set TETHER_REDIS_URL (redis://HOST:6379/0), or start the run with `tether up`, "
            f"which keeps one in {settings.run_dir / 'ledger'}"
        )
    return url


@contextlib.asynccontextmanager
async def open_ledger(settings: Settings) -> AsyncIterator[RedisLedger]:
    """Connect to the run's ledger; close the connection at the end of the block.

    Raises:
        SettingsError: no ledger is configured, or its URL is wrong.
        Unavailable: the server did not answer within `ledger.retry_s`.
    """
    config = settings.ledger
    ledger = await RedisLedger.connect(
        ledger_url(settings),
        settings.run.name,
        timeout_s=config.timeout_s,
        retry_s=config.retry_s,
        archive_limit=config.archive_limit,
    )
    try:
        yield ledger
    finally:
        await ledger.close()


async def status_if_created(ledger: Ledger) -> LedgerStatus | None:
    """Return the ledger's counters; None if it does not have the run."""
    try:
        return await ledger.status()
    except Refused as refusal:
        if refusal.reason is Reason.NO_RUN:
            return None
        raise
