"""Does what a page of docs/ says: blocks with a file name are files, blocks of bash are typed in a shell."""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from tests.integration.command import tether
from tests.warm.popen import VARIABLES

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)

WITHOUT_SPARES = {"TETHER_SERVICES__SPARES": "false"}
"""No page kills a service, and its spare would import as much as it has."""


def blocks(page: str) -> Iterator[tuple[str, str, str]]:
    """Yield language, file name and text of each block of a page."""
    for block in BLOCK.finditer((DOCS / page).read_text()):
        yield block[1], block[2] or "", block[3]


def follow(page: str, place: Path) -> str:
    """Write the files and type the commands of a page in a directory; return what was printed."""
    environ = {**VARIABLES, **WITHOUT_SPARES, "PATH": f"{Path(sys.executable).parent}:{VARIABLES['PATH']}"}
    printed = ""
    for language, name, text in blocks(page):
        if name:
            (place / name).write_text(text)
        elif language == "bash":
            command = ["bash", "-eu", "-c", text]
            result = subprocess.run(
                command, cwd=place, env=environ, capture_output=True, text=True, timeout=600
            )
            assert result.returncode == 0, f"{text}\n{result.stdout}\n{result.stderr}"
            printed += result.stdout
    return printed


def begin(page: str, place: Path) -> None:
    """Make the directories that a page makes by `tether init`, and write its files."""
    for language, _, text in blocks(page):
        for name in re.findall(r"^tether init (\S+)$", text, re.MULTILINE) if language == "bash" else ():
            done = tether("init", str(place / name))
            assert done.returncode == 0, done.stderr
    for _, name, text in blocks(page):
        if name:
            (place / name).write_text(text)


def program(name: str) -> ModuleType:
    """Import the program docs/NAME.py."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
