"""Identifiers. Groups are numbered by the ledger; everything else is random and short enough to read in a
log."""

import re
import secrets

from protocol.errors import SettingsError

RUN_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")


def new_epoch() -> str:
    """An epoch: 64 random bits a trainer draws when it takes over a run, as 16 hex digits."""
    return secrets.token_hex(8)


def new_token() -> str:
    """A lease token, a message id or a request id: 64 random bits as 16 hex digits."""
    return secrets.token_hex(8)


def new_incarnation(name: str) -> str:
    """One life of a process: `name` and 32 random bits. A restarted process is another incarnation."""
    return f"{name}.{secrets.token_hex(4)}"


def checked_run_id(run: str) -> str:
    """Return `run` if it may name a run (it becomes a Redis key and a directory).

    Raises:
        SettingsError: with the pattern that it must match.
    """
    if not RUN_ID.fullmatch(run):
        raise SettingsError(
            f"run name {run!r}: use lower-case letters, digits, '-' and '_', at most 63, starting with a letter or digit"
        )
    return run
