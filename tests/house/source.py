"""Reads the repository's modules, tests and documents for the house rules."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKAGES = ("protocol", "services", "trainer", "rollout", "reward")
"""Top-level packages of the product."""


@dataclass(frozen=True)
class Violation:
    """One place that breaks a rule."""

    path: str
    """Relative to the repository's root."""
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.rule}: {self.message}"


@dataclass(frozen=True)
class Module:
    """One parsed Python file."""

    name: str
    """Dotted name; that of the package for an `__init__`."""
    path: str
    """Relative to the repository's root, with slashes."""
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree."""
        return list(ast.walk(self.tree))

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def file(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def folder(self) -> str:
        return self.path.rpartition("/")[0]

    @cached_property
    def docstrings(self) -> list[tuple[int, str]]:
        """Docstrings of modules, classes, functions and fields, with their first lines."""
        return [
            (node.lineno, node.value.value)
            for node in self.nodes
            if isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ]

    @cached_property
    def strings(self) -> list[tuple[int, str]]:
        """String literals that are no docstrings, with their first lines."""
        docstrings = {id(node.value) for node in self.nodes if isinstance(node, ast.Expr)}
        return [
            (node.lineno, node.value)
            for node in self.nodes
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
        ]

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node

    def classes(self) -> Iterator[ast.ClassDef]:
        for node in self.nodes:
            if isinstance(node, ast.ClassDef):
                yield node


@dataclass(frozen=True)
class Import:
    """One name that a module imports."""

    line: int
    target: str
    """Module of the repository that is imported, or the one that has the name."""
    name: str | None
    """Imported name of `target`; None if the module itself is imported."""
    type_checking: bool
    """Whether it stands below `if TYPE_CHECKING`."""


@dataclass(frozen=True)
class House:
    """The repository as the rules see it."""

    root: Path
    product: Mapping[str, Module]
    tests: Mapping[str, Module]
    documents: Mapping[str, str]
    """Markdown text by path, without the results of measurements."""

    @cached_property
    def modules(self) -> Mapping[str, Module]:
        """Product and tests."""
        return {**self.product, **self.tests}

    def imports(self, module: Module) -> list[Import]:
        """Imports of the repository's own modules, also inside functions and by `import_module("name")`."""
        guarded = {
            id(child)
            for node in module.nodes
            if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
            for child in ast.walk(node)
        }
        found = []
        for node in module.nodes:
            if isinstance(node, ast.Import):
                names: list[tuple[str, str | None]] = [(alias.name, None) for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [
                    (whole, None)
                    if (whole := f"{node.module}.{alias.name}") in self.modules
                    else (node.module, alias.name)
                    for alias in node.names
                ]
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                names = [(arg.value, None) for arg in node.args[:1] if isinstance(arg, ast.Constant)]
            else:
                continue
            found += [
                Import(node.lineno, target, name, id(node) in guarded)
                for target, name in names
                if target in self.modules
            ]
        return found


def read_house(root: Path) -> House:
    """Read the modules and documents of the repository at `root`."""
    product: dict[str, Module] = {}
    for package in PACKAGES:
        product |= _read_modules(root, package)
    documents = [
        *root.glob("*.md"),
        *(root / "docs").rglob("*.md"),
    ]
    return House(
        root,
        product,
        _read_modules(root, "tests"),
        {path.relative_to(root).as_posix(): path.read_text() for path in sorted(documents)},
    )


def _read_modules(root: Path, package: str) -> dict[str, Module]:
    modules = {}
    for path in sorted((root / package).rglob("*.py")):
        relative = path.relative_to(root)
        name = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        modules[name] = Module(name, relative.as_posix(), path.read_text())
    return modules
