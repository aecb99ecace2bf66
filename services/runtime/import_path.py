"""Makes Python import tether's packages before the working directory and PYTHONPATH.

`python -m services.X` searches the working directory first, and PYTHONPATH before installed packages. A
user's module `reward` or `trainer` would replace tether's, and a `json` would replace Python's. This module
imports no tether module, because it runs before all other tether imports.
"""

import importlib.machinery
import os
import site
import sys
from collections.abc import Mapping
from pathlib import Path

PACKAGES = ("protocol", "reward", "rollout", "trainer")
"""Top-level packages of tether other than `services`."""
ROOT = str(Path(__file__).absolute().parents[2])
"""Directory with tether's packages: the repository or the installation directory."""


def protect_imports() -> None:
    """Move tether's packages before others of the same names, for the rest of this process.

    Removes the working directory from `sys.path`, where `python -m services.X` put it first.
    """
    if is_service() and not sys.flags.safe_path and sys.path[:1] == [os.getcwd()] != [ROOT]:
        del sys.path[0]
        os.environ["PYTHONSAFEPATH"] = "1"  # for child processes
    for place, entry in enumerate(sys.path):
        if os.path.abspath(entry) == ROOT:
            return
        if any(_holds(entry, name) for name in PACKAGES):
            sys.path.insert(place, ROOT)
            return


def is_service() -> bool:
    """Return whether Python was started as `python -m services.X` and is about to find that module."""
    return sys.argv[:1] == ["-m"] and any(word.split(".")[0] == "services" for word in sys.orig_argv)


def safe_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which `python -m services.X` imports tether's packages.

    The working directory is not searched; PYTHONPATH is searched after tether's packages.
    """
    path = environ.get("PYTHONPATH", "")
    if ROOT not in (*site.getsitepackages(), site.getusersitepackages()):
        path = os.pathsep.join(filter(None, [ROOT, path]))
    return {**environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": path}


def _holds(directory: str, package: str) -> bool:
    """Return whether a directory contains a module or a package (with `__init__.py`) of this name."""
    found = importlib.machinery.PathFinder.find_spec(package, [directory])
    return found is not None and found.has_location
