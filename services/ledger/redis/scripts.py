"""Loads the Lua scripts as they are sent to the server."""

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from services.ledger.redis.keys import NAMES

_DIRECTORY = Path(__file__).parent / "lua"
_SHARED = "_shared"


@dataclass(frozen=True, slots=True)
class Script:
    """One transition: the key names, `lua/_shared.lua`, and `lua/NAME.lua`."""

    name: str
    """NAME."""
    body: bytes
    """Lua source."""
    sha: str
    """SHA-1 of the source in hexadecimal, by which EVALSHA names it."""


@cache
def script(name: str) -> Script:
    """Return the script called `name`.

    Raises:
        FileNotFoundError: if there is none.
    """
    keys = ", ".join(f"'{key}'" for key in NAMES)
    parts = [(_DIRECTORY / f"{part}.lua").read_bytes() for part in (_SHARED, name)]
    body = b"\n".join([f"local NAMES = {{{keys}}}".encode(), *parts])
    return Script(name, body, hashlib.sha1(body, usedforsecurity=False).hexdigest())
