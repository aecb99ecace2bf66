"""Creates and checks identifiers.

Groups are numbered by the ledger; every other id is random, and short enough to read in a log.
"""

import re
import secrets

from protocol.errors import SettingsError

RUN_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")


def new_epoch() -> str:
    """Return an epoch, which a trainer draws when it takes over a run: 64 random bits as 16 hex digits."""
    return secrets.token_hex(8)


def new_token() -> str:
    """Return a lease token, message id or request id: 64 random bits as 16 hex digits."""
    return secrets.token_hex(8)


def new_incarnation(name: str) -> str:
    """Return the id of one lifetime of a process: `name` and 32 random bits; a restart gets a new one."""
    return f"{name}.{secrets.token_hex(4)}"


def checked_run_id(run: str) -> str:
    """Return `run` if it is a valid run name (it becomes part of Redis keys and a directory name).

    Raises:
        SettingsError: it is not; says which characters are allowed.
    """
    if not RUN_ID.fullmatch(run):
        raise SettingsError(
            f"run name {run!r}: use lower-case letters, digits, '-' and '_', at most 63, "
            "starting with a letter or digit"
        )
    return run
