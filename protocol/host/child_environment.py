"""Makes the environment of a process that imports our packages, and changes this process's for a while."""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
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


@contextmanager
def with_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Have environment variables within the block, in this process and in those that it starts there."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
