"""Rules of documents: the paths, names, settings and numbers they mention are those of the code.

The paths in docstrings of modules are, too.
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from tests.house.source import PACKAGES, House, Module, Violation
from tests.house.tables import CONSTANTS, FOREIGN_NAMES, MADE_PATHS, MOST_WORDS, Constant

WIDTH = 100
"""Columns of prose in Markdown."""
_FOLDERS = (*PACKAGES, "tests", "docs", "results", "deploy")
_PATH = re.compile(rf"(?<![\w./-])(?:{'|'.join(_FOLDERS)})/[\w./*-]*(?![\w{{<])")
_FILE = re.compile(r"(?<![\w./*-])\w+\.(?:py|lua)\b(?![./])")
_LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
_QUOTED_FILE = re.compile(r"`([\w./-]+\.(?:py|lua))`")
_CODE = re.compile(r"`([^`\n]+)`")
_DOTTED = re.compile(rf"(?<![\w./])(?:{'|'.join((*PACKAGES, 'tests'))})(?:\.[A-Za-z_]\w*)+")
_COMMANDS = "docs/commands.md"
_FENCED = re.compile(r"^ *(```|~~~).*?^ *\1", re.MULTILINE | re.DOTALL)
_WIDE = re.compile(r"^\s*(?:[|<!#]|\[[^\]]+\]:)|\S{60,}|`[^`]{40,}`|^ {4,}")
_CLASS = re.compile(r"[A-Z]+[a-z0-9]\w*[A-Z]\w*(?:\.\w+)*")


def document_path(house: House) -> Iterator[Violation]:
    """Find paths and links in documents that lead nowhere.

    A path begins with a folder of the repository, or is the bare name of a Python or Lua file; `*` stands for
    anything, a path with NAME in it is a pattern for the reader.
    """
    names = {path.name for folder in _FOLDERS for path in (house.root / folder).rglob("*.*")}
    for document, text in house.documents.items():
        for match in _PATH.finditer(text):
            path = match.group().rstrip(".")
            if "NAME" not in path and path not in MADE_PATHS and not _exists(house.root, path):
                yield _at(document, text, match, "document-path", f"there is no {path}")
        for match in _FILE.finditer(text):
            if "NAME" not in match.group() and match.group() not in names | MADE_PATHS:
                yield _at(document, text, match, "document-path", f"no file is called {match.group()}")
        for match in _LINK.finditer(text):
            if not (house.root / document).parent.joinpath(match.group(1)).exists():
                yield _at(document, text, match, "document-path", f"the link to {match.group(1)} is broken")


def docstring_path(house: House) -> Iterator[Violation]:
    """Find files in docstrings of modules that are neither below the module's folder nor below the root."""
    for module in house.modules.values():
        text = ast.get_docstring(module.tree, clean=False) or ""
        for match in _QUOTED_FILE.finditer(text):
            path = match.group(1)
            if not any((house.root / start / path).is_file() for start in (module.folder, "")):
                yield _at(module.path, text, match, "docstring-path", f"there is no {path}")


def document_name(house: House, settings: Callable[[], Any] | None = None) -> Iterator[Violation]:
    """Find dotted names and class names in documents that the code does not have.

    A name such as `trainer.archive_mb` may be a setting; `settings` gives those by default.
    """
    sections = (settings or _default_settings)()
    words = {word for module in house.modules.values() for word in _words(module)}
    for document, text in house.documents.items():
        for code in _CODE.finditer(text):
            for match in _DOTTED.finditer(code.group(1)):
                name = match.group()
                known = _is_defined(house, name) or _is_setting(sections, name) or name in FOREIGN_NAMES
                if not known:
                    yield _at(document, text, code, "document-name", f"neither code nor settings have {name}")
            if _CLASS.fullmatch(code.group(1).removesuffix("()")):
                for part in code.group(1).removesuffix("()").split("."):
                    if part not in words and part not in FOREIGN_NAMES:
                        yield _at(
                            document, text, code, "document-name", f"nothing in the code is called {part}"
                        )


def document_number(house: House, constants: Sequence[Constant] = CONSTANTS) -> Iterator[Violation]:
    """Find numbers in documents that differ from the constants they state."""
    for constant in constants:
        text = house.documents.get(constant.document, "")
        matches = list(re.finditer(constant.pattern.replace(" ", r"\s+"), text))
        if not matches:
            message = f"does not say {constant.pattern!r}, which tests/house/tables.py compares"
            yield Violation(constant.document, 1, "document-number", message)
        for match in matches:
            said = float(match.group(1).replace(",", ""))
            value = constant.scale(_value(house, constant.name))
            if said != value:
                message = f"says {match.group(1)}, but {constant.name} gives {value:g}"
                yield _at(constant.document, text, match, "document-number", message)


def document_default(house: House, settings: Callable[[], Any] | None = None) -> Iterator[Violation]:
    """Find rows of the table of settings in docs/commands.md whose default is not the setting's.

    A row is `| variable | setting | meaning | default |`.
    """
    sections = (settings or _default_settings)()
    text = house.documents.get(_COMMANDS, "")
    for match in re.finditer(r"^\| `TETHER_\w+` \| `([\w.]+)` \|.*\| ([^|]+) \|$", text, re.MULTILINE):
        name, said = match.group(1), match.group(2).strip("` ")
        if not _is_setting(sections, name):
            yield _at(_COMMANDS, text, match, "document-default", f"there is no setting {name}")
            continue
        value = sections
        for part in name.split("."):
            value = getattr(value, part)
        if said != str(value):
            yield _at(_COMMANDS, text, match, "document-default", f"{name} is {value} by default, not {said}")


def document_length(house: House, most: Mapping[str, int] = MOST_WORDS) -> Iterator[Violation]:
    """Find documents with more words than the table allows."""
    for document, limit in most.items():
        words = len(house.documents.get(document, "").split())
        if words > limit:
            yield Violation(document, 1, "document-length", f"has {words} words; {limit} at most")


def document_width(house: House) -> Iterator[Violation]:
    """Find lines of prose over 100 columns; tables, code, links and generated documents may be wider."""
    for document, text in house.documents.items():
        if "Generated by `python" in text:
            continue
        prose = _FENCED.sub(lambda block: "\n" * block.group().count("\n"), text)
        for number, line in enumerate(prose.splitlines(), 1):
            if len(line) > WIDTH and not _WIDE.search(line):
                yield Violation(
                    document, number, "document-width", f"has {len(line)} columns; {WIDTH} at most"
                )


def _exists(root: Path, path: str) -> bool:
    return any(root.glob(path.rstrip("/"))) if "*" in path else (root / path).exists()


def _at(document: str, text: str, match: re.Match[str], rule: str, message: str) -> Violation:
    return Violation(document, text.count("\n", 0, match.start()) + 1, rule, message)


def _words(module: Module) -> Iterator[str]:
    yield from re.findall(r"\w+", module.text)


def _is_defined(house: House, name: str) -> bool:
    """Tell whether a dotted name is a module, or a name that a module binds; members are not followed."""
    if (house.root / name.replace(".", "/")).is_dir():
        return True
    package, _, rest = name, "", ""
    while package and package not in house.modules:
        package, _, last = package.rpartition(".")
        rest = f"{last}.{rest}" if rest else last
    return bool(package) and (not rest or rest.partition(".")[0] in _bound(house.modules[package].tree))


def _bound(tree: ast.Module) -> set[str]:
    names = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def _is_setting(sections: Any, name: str) -> bool:
    value = sections
    for part in name.split("."):
        if not is_dataclass(value) or part not in {field.name for field in fields(value)}:
            return False
        value = getattr(value, part)
    return True


def _default_settings() -> Any:
    from services.settings.sections import Settings

    return Settings()


def _value(house: House, name: str) -> Any:
    """Return a constant of a module, computed from its source: nothing is imported for it, torch least of
    all.

    Raises:
        KeyError: if there is no such constant.
    """
    module, _, attribute = name.rpartition(".")
    assigned = {
        target.id: node.value
        for node in house.modules[module].tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    needed = {node.id for node in ast.walk(assigned[attribute]) if isinstance(node, ast.Name)}
    values = {needed_name: _value(house, f"{module}.{needed_name}") for needed_name in needed}
    return eval(ast.unparse(assigned[attribute]), {"__builtins__": {}}, values)
