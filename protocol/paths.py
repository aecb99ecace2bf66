"""Marks the fields of settings that are paths: `path: FilePath = ""`.

A path that stands in a settings file is relative to that file; one of a command line or an environment
variable to the working directory. `services.settings.paths` makes all of them absolute.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(?<!\.json)(?<!\.jsonl)(?<!\.parquet)")
"""OWNER/NAME on the Hugging Face hub; names of data files are none."""


@dataclass(frozen=True, slots=True)
class PathMark:
    """Mark of a field that is a path, or empty."""

    or_name: bool = False
    """Whether text without a slash is no path, but the name of a program."""
    or_hub: bool = False
    """Whether OWNER/NAME is a name on the Hugging Face hub where there is no such path."""

    def absolute(self, text: str, directory: Path) -> str:
        """Return the path as an absolute one, relative to `directory` if it was not; `~` is the home."""
        if not text or (self.or_name and "/" not in text):
            return text
        path = absolute(Path(os.path.expanduser(text)), directory)
        return text if self.or_hub and HUB_NAME.fullmatch(text) and not path.exists() else str(path)


FilePath = Annotated[str, PathMark()]
"""A file or directory."""
HubPath = Annotated[str, PathMark(or_hub=True)]
"""A file or directory, or a name on the hub."""
ProgramPath = Annotated[str, PathMark(or_name=True)]
"""A program: a path with a slash, or a name that is found as a shell finds it."""


def absolute(path: Path, directory: Path) -> Path:
    """Return a path as an absolute one without `..`; other links than those before a `..` are kept."""
    parts = Path(directory.absolute(), path).parts
    up = max((place + 1 for place, part in enumerate(parts) if part == ".."), default=0)
    return Path(Path(*parts[:up]).resolve(), *parts[up:]) if up else Path(*parts)
