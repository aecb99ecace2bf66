"""Creates and checks identifiers.

The ledger numbers the groups. Every other id is random and short enough to read in a log.
"""

import re
import secrets

from protocol.errors import SettingsError

RUN_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")


def new_epoch() -> str:
    """Return a new epoch: 64 random bits as 16 hex digits.

    A trainer creates an epoch when it takes over a run.
    """
    return secrets.token_hex(8)


def new_token() -> str:
    """Return a lease token, message id or request id: 64 random bits as 16 hex digits."""
    return secrets.token_hex(8)


def new_incarnation(name: str) -> str:
    """Return a new id for one lifetime of the process `name`: NAME.HEX with 32 random bits."""
    return f"{name}.{secrets.token_hex(4)}"


def checked_run_id(run: str) -> str:
    """Return `run` if it is a valid run name, which is safe in Redis keys and as a directory name.

    Raises:
        SettingsError: the message lists the allowed characters.
    """
    if not RUN_ID.fullmatch(run):
        raise SettingsError(
            f"run name {run!r}: use lower-case letters, digits, '-' and '_', at most 63, "
            "starting with a letter or digit"
        )
    return run
