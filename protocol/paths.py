"""Marks the fields of settings that are paths: `path: FilePath = ""`.

A path that stands in a settings file is relative to that file; one of a command line or an environment
variable to the working directory. `services.settings.paths` makes all of them absolute.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated


@dataclass(frozen=True, slots=True)
class PathMark:
    """Mark of a field that is a path, or empty."""

    or_name: bool = False
    """Whether text without a slash is no path, but the name of a program."""

    def absolute(self, text: str, directory: Path) -> str:
        """Return the path as an absolute one, relative to `directory` if it was not; `~` is the home."""
        if not text or (self.or_name and "/" not in text):
            return text
        return str(absolute(Path(os.path.expanduser(text)), directory))


FilePath = Annotated[str, PathMark()]
"""A file or directory."""
ProgramPath = Annotated[str, PathMark(or_name=True)]
"""A program: a path with a slash, or a name that is found as a shell finds it."""


def absolute(path: Path, directory: Path) -> Path:
    """Return a path as an absolute one without `..`; other links than those before a `..` are kept."""
    parts = Path(directory.absolute(), path).parts
    up = max((place + 1 for place, part in enumerate(parts) if part == ".."), default=0)
    return Path(Path(*parts[:up]).resolve(), *parts[up:]) if up else Path(*parts)
