"""Has Python import our own packages first, before the working directory and PYTHONPATH.

`python -m services.X` searches the working directory first, and PYTHONPATH before installed packages: a
user's module `reward` or `trainer` there would replace ours, and a `json` Python's own. It imports no module
of ours, because it runs before all other imports of ours.
"""

import importlib.machinery
import os
import site
import sys
from collections.abc import Mapping
from pathlib import Path

PACKAGES = ("protocol", "reward", "rollout", "trainer")
"""Our other packages."""
ROOT = str(Path(__file__).absolute().parents[2])
"""Directory that holds our packages: the repository, or where they are installed."""


def protect_imports() -> None:
    """Put our packages before others of the same names, for the rest of this process.

    The working directory, which `python -m services.X` put first on `sys.path`, is removed from it.
    """
    if is_service() and not sys.flags.safe_path and sys.path[:1] == [os.getcwd()] != [ROOT]:
        del sys.path[0]
        os.environ["PYTHONSAFEPATH"] = "1"  # the same for the processes that this one starts
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
    """Return an environment in which `python -m services.X` imports our packages and none of their names.

    The working directory is not searched. Directories of PYTHONPATH are, after ours.
    """
    path = environ.get("PYTHONPATH", "")
    if ROOT not in (*site.getsitepackages(), site.getusersitepackages()):
        path = os.pathsep.join(filter(None, [ROOT, path]))
    return {**environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": path}


def _holds(directory: str, package: str) -> bool:
    """Return whether a directory has a module or package of a name; one without `__init__.py` is none."""
    found = importlib.machinery.PathFinder.find_spec(package, [directory])
    return found is not None and found.has_location
