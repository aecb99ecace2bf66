"""Makes the environment of a process that imports our packages and needs none of our settings."""

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

ROOT = str(Path(__file__).resolve().parents[2])
"""Directory that has our packages."""


def child_environment(
    variables: Mapping[str, str] = MappingProxyType({}),
    *,
    without: Collection[str] = (),
    first: Sequence[str] = (),
) -> dict[str, str]:
    """Return this process's environment without our settings, which may have credentials.

    Args:
        variables: over the inherited ones; their PYTHONPATH is searched after our packages, and before the
            inherited one.
        without: names of further variables that are not inherited.
        first: directories that are searched before our packages.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TETHER_") and name not in without
    }
    path = [*first, ROOT, variables.get("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")]
    return {**kept, **variables, "PYTHONPATH": os.pathsep.join(filter(None, path))}
