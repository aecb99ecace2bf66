"""Marks fields of settings: paths (`path: FilePath = ""`) and what people set first (`= set_first(100)`).

A path that stands in a settings file is relative to that file; one of a command line or an environment
variable to the working directory. `services.settings.paths` makes all of them absolute.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

HUB_NAME = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?<!\.json)(?<!\.jsonl)(?<!\.parquet)"
"""Pattern of OWNER/NAME on the Hugging Face hub; names of data files are none."""


@dataclass(frozen=True, slots=True)
class PathMark:
    """Mark of a field that is a path, or empty."""

    names: str = ""
    """Regular expression of text that is a name and no path, unless there is a file of that name."""

    def absolute(self, text: str, directory: Path) -> str:
        """Return the path as an absolute one, relative to `directory` if it was not; `~` is the home."""
        path = absolute(Path(os.path.expanduser(text)), directory)
        is_name = self.names and re.fullmatch(self.names, text) and not path.exists()
        return str(path) if text and not is_name else text


FilePath = Annotated[str, PathMark()]
"""A file or directory."""
ProgramPath = Annotated[str, PathMark(names=r"[^/]+")]
"""A program: a path with a slash, or a name that is found as a shell finds it."""
HubPath = Annotated[str, PathMark(names=HUB_NAME)]
"""A file or directory, or OWNER/NAME on a hub."""

T = TypeVar("T")
FIRST: Mapping[str, Any] = {"first": True}
"""Metadata of a field that people set first. The reference has other fields under "advanced"."""


def set_first(default: T) -> T:
    """Return a field with a default, marked with `FIRST`."""
    marked: T = field(default=default, metadata=FIRST)
    return marked


def absolute(path: Path, directory: Path) -> Path:
    """Return a path as an absolute one without `..`; other links than those before a `..` are kept."""
    parts = Path(directory.absolute(), path).parts
    up = max((place + 1 for place, part in enumerate(parts) if part == ".."), default=0)
    return Path(Path(*parts[:up]).resolve(), *parts[up:]) if up else Path(*parts)
