"""The Lua scripts as they are sent to the server."""

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_DIRECTORY = Path(__file__).parent / "lua"
_SHARED = "_shared"


@dataclass(frozen=True, slots=True)
class Script:
    """One transition: `lua/NAME.lua` behind `lua/_shared.lua`."""

    name: str
    body: bytes
    sha: str
    """What EVALSHA calls it by."""


@cache
def script(name: str) -> Script:
    """Read the script called `name`.

    Raises:
        FileNotFoundError: if there is none.
    """
    body = b"\n".join((_DIRECTORY / f"{part}.lua").read_bytes() for part in (_SHARED, name))
    return Script(name, body, hashlib.sha1(body, usedforsecurity=False).hexdigest())


def names() -> tuple[str, ...]:
    """Every script, in order of name."""
    return tuple(sorted(path.stem for path in _DIRECTORY.glob("*.lua") if path.stem != _SHARED))
