"""Marks fields of settings: paths (`path: FilePath = ""`) and basic settings (`= basic_setting(100)`).

A path in a settings file is relative to the file. A path in a command line or an environment variable is
relative to the working directory. `services.settings.paths` makes all paths absolute.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

HUB_NAME = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?<!\.json)(?<!\.jsonl)(?<!\.parquet)"
"""Pattern of OWNER/NAME on the Hugging Face hub; names of data files do not match."""


@dataclass(frozen=True, slots=True)
class PathMark:
    """Mark of a field that contains a path or is empty."""

    names: str = ""
    """Regular expression of text that is a name instead of a path, unless a file with that name exists."""

    def absolute(self, text: str, directory: Path) -> str:
        """Return a path as an absolute path, and names unchanged.

        A relative path starts at `directory`; `~` is the home directory.
        """
        path = absolute(Path(os.path.expanduser(text)), directory)
        is_name = self.names and re.fullmatch(self.names, text) and not path.exists()
        return str(path) if text and not is_name else text


FilePath = Annotated[str, PathMark()]
"""Path of a file or directory."""
ProgramPath = Annotated[str, PathMark(names=r"[^/]+")]
"""Program: a path that contains a slash, or a name to find in PATH."""
HubPath = Annotated[str, PathMark(names=HUB_NAME)]
"""Path of a file or directory, or OWNER/NAME on a hub."""

T = TypeVar("T")
BASIC: Mapping[str, Any] = {"first": True}
"""Metadata of a basic setting. The settings reference lists all other fields under "advanced"."""


def basic_setting(default: T) -> T:
    """Return a field with a default and the mark `BASIC`."""
    marked: T = field(default=default, metadata=BASIC)
    return marked


def absolute(path: Path, directory: Path) -> Path:
    """Return a path as an absolute path without `..`; resolves only the symbolic links before a `..`."""
    parts = Path(directory.absolute(), path).parts
    up = max((place + 1 for place, part in enumerate(parts) if part == ".."), default=0)
    return Path(Path(*parts[:up]).resolve(), *parts[up:]) if up else Path(*parts)
