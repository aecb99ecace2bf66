"""Rules of size: folders, modules, functions, and modules too short to stand alone."""

import ast
from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from tests.house.source import House, Module, Violation
from tests.house.tables import SHORT_MODULES

FOLDER_MODULES = 14
"""Most modules in a folder of the product, `__init__` and `__main__` not counted."""
MODULE_LINES = 400
FUNCTION_LINES = 50
"""Most lines of a function of the product, from `def` to its end."""
TEST_FUNCTION_LINES = 80
SHORT_LINES = 40
"""A shorter module needs two importers or a reason."""
STARTED_FROM_SERVICES = ("__init__.py", "cli.py", "prepare.py", "reward.py", "spare.py")
"""Modules at the top of services/: what can be started."""


def folder_size(house: House) -> Iterator[Violation]:
    """Find folders of the product with too many modules."""
    counts = Counter(
        module.folder
        for module in house.product.values()
        if module.file not in ("__init__.py", "__main__.py")
    )
    for folder, count in counts.items():
        if count > FOLDER_MODULES:
            yield Violation(folder, 1, "folder-size", f"{count} modules, at most {FOLDER_MODULES}")


def services_top(house: House) -> Iterator[Violation]:
    """Find modules at the top of services/ that nobody starts."""
    for module in house.product.values():
        if module.folder == "services" and module.file not in STARTED_FROM_SERVICES:
            yield Violation(
                module.path, 1, "services-top", "only what is started lies at the top of services/"
            )


def module_length(house: House) -> Iterator[Violation]:
    """Find modules of product and tests that are too long."""
    for module in house.modules.values():
        if module.lines > MODULE_LINES:
            yield Violation(module.path, 1, "module-length", f"{module.lines} lines, at most {MODULE_LINES}")


def function_length(house: House) -> Iterator[Violation]:
    """Find functions that are too long."""
    for modules, limit in ((house.product, FUNCTION_LINES), (house.tests, TEST_FUNCTION_LINES)):
        for module in modules.values():
            for function in module.functions():
                lines = (function.end_lineno or 0) - function.lineno + 1
                if lines > limit:
                    message = f"{function.name} has {lines} lines, at most {limit}"
                    yield Violation(module.path, function.lineno, "function-length", message)


def short_module(house: House, excepted: Mapping[str, str] = SHORT_MODULES) -> Iterator[Violation]:
    """Find short modules that belong into their only importer.

    Allowed are `__init__` and `__main__`, modules that two others import, registries, what a registry names,
    interfaces, and the modules of the table, each of which must need its entry.
    """
    importers = Counter(
        target
        for module in house.product.values()
        for target in {found.target for found in house.imports(module)}
    )
    registered = {name for module in house.product.values() for name in _registered(module)}
    needed = set()
    for module in house.product.values():
        if module.lines >= SHORT_LINES or module.file in ("__init__.py", "__main__.py", "registry.py"):
            continue
        if importers[module.name] >= 2 or module.name in registered or _is_interface(module):
            continue
        needed.add(module.name)
        if module.name not in excepted:
            message = (
                f"{module.lines} lines and {importers[module.name]} importers: belongs into another module"
            )
            yield Violation(module.path, 1, "short-module", message)
    yield from _stale(excepted, needed, "short-module")


def _registered(module: Module) -> Iterator[str]:
    """Names of modules that a registry imports, or names by a string: its own siblings by their last part."""
    if module.file != "registry.py":
        return
    package = module.name.rpartition(".")[0]
    for node in module.nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.partition(":")[0]
            yield f"{package}.{node.value}"


def _is_interface(module: Module) -> bool:
    """Tell whether a module only declares classes: protocols, abstract classes, records, errors."""
    body = [
        node
        for node in module.tree.body
        if not isinstance(node, ast.Import | ast.ImportFrom | ast.Expr | ast.Assign | ast.AnnAssign)
    ]
    return bool(body) and all(isinstance(node, ast.ClassDef) and _is_declaration(node) for node in body)


def _is_declaration(node: ast.ClassDef) -> bool:
    bases = {ast.unparse(base).rpartition(".")[2].partition("[")[0] for base in node.bases}
    decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
    return "dataclass" in decorators or bool(
        bases
        & {"Protocol", "ABC", "Struct", "Message", "NamedTuple", "Enum", "StrEnum", "TypedDict", "Exception"}
    )


def _stale(excepted: Collection[str], needed: Collection[str], rule: str) -> Iterator[Violation]:
    for name in sorted(set(excepted) - set(needed)):
        yield Violation("tests/house/tables.py", 1, rule, f"the exception {name} is not needed")
