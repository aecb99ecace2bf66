"""Builds environments for processes that import tether, and sets variables temporarily in this process."""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

ROOT = str(Path(__file__).resolve().parents[2])
"""Directory that contains tether's packages."""


def child_environment(
    variables: Mapping[str, str] = MappingProxyType({}),
    *,
    without: Collection[str] = (),
    first: Sequence[str] = (),
) -> dict[str, str]:
    """Return this process's environment without TETHER_ variables, which may contain credentials.

    Args:
        variables: override inherited variables. Their PYTHONPATH is searched after tether's packages and
            before the inherited PYTHONPATH.
        without: names of further variables to remove.
        first: directories to search before tether's packages.
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
    """Set environment variables within the block, for this process and processes started there."""
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
