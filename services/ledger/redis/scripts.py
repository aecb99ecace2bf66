"""Loads the Lua scripts that are sent to the server."""

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from services.ledger.redis.keys import NAMES

_DIRECTORY = Path(__file__).parent / "lua"
_SHARED = "_shared"


@dataclass(frozen=True, slots=True)
class Script:
    """Source of a transition: key names, `lua/_shared.lua` and `lua/NAME.lua`."""

    name: str
    """NAME of the script."""
    body: bytes
    """Lua source."""
    sha: str
    """SHA-1 of the source in hexadecimal, the argument of EVALSHA."""


@cache
def script(name: str) -> Script:
    """Return the script called `name`.

    Raises:
        FileNotFoundError: there is no such script.
    """
    keys = ", ".join(f"'{key}'" for key in NAMES)
    parts = [(_DIRECTORY / f"{part}.lua").read_bytes() for part in (_SHARED, name)]
    body = b"\n".join([f"local NAMES = {{{keys}}}".encode(), *parts])
    return Script(name, body, hashlib.sha1(body, usedforsecurity=False).hexdigest())
