"""Rules of names: classes, tests, and where a test file lies."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from tests.house.source import House, Module, Violation
from tests.house.tables import DUPLICATE_CLASSES, SCENARIO_FOLDERS, SCENARIOS

_TABLES = "tests/house/tables.py"


def duplicate_class(house: House, excepted: Mapping[str, str] = DUPLICATE_CLASSES) -> Iterator[Violation]:
    """Find class names that the product uses twice, and exceptions that nothing needs."""
    places = defaultdict(list)
    for module in house.product.values():
        for node in module.classes():
            places[node.name].append((module.path, node.lineno))
    twice = {name: found for name, found in places.items() if len(found) > 1}
    for name, found in sorted(twice.items()):
        if name not in excepted:
            for path, line in found:
                others = ", ".join(other for other, _ in found if other != path)
                yield Violation(path, line, "duplicate-class", f"{name} is also in {others or path}")
    for name in sorted(set(excepted) - set(twice)):
        yield Violation(_TABLES, 1, "duplicate-class", f"the exception {name} is not needed")


def name_of_test(house: House) -> Iterator[Violation]:
    """Find tests whose name lacks a subject or a property: less than three words after `test_`, or `what`."""
    for module in house.tests.values():
        for function in module.functions():
            if function.name.startswith("test_") and not re.fullmatch(
                r"test(?!_what_)(_[a-z0-9]+){3,}", function.name
            ):
                message = (
                    f"{function.name}: test_<subject>_<property>, three words or more, the subject named"
                )
                yield Violation(module.path, function.lineno, "test-name", message)


def docstring_of_test(house: House) -> Iterator[Violation]:
    """Find test files that do not say what they test."""
    for module in house.tests.values():
        if _is_test(module) and not ast.get_docstring(module.tree):
            yield Violation(
                module.path, 1, "test-docstring", "the module has no docstring that says what it tests"
            )


def place_of_test(
    house: House, scenarios: Mapping[str, str] = SCENARIOS, folders: Mapping[str, str] = SCENARIO_FOLDERS
) -> Iterator[Violation]:
    """Find test files that are named after no module and no listed scenario.

    `tests/a/b/test_c.py` tests the module or package `a/b/c`, an aspect of the module `a/b`, or its neighbour
    `tests/a/b/c.py`; `tests/a/b/test_b.py` tests the package `a/b`. Others are listed, alone or by their
    folder.
    """
    needed = set()
    for module in house.tests.values():
        if not _is_test(module) or module.folder in folders:
            continue
        folder = module.name.rpartition(".")[0]
        mirrored = folder.partition(".")[2]
        subject = module.file.removeprefix("test_").removesuffix(".py")
        is_aspect = mirrored in house.product and not house.product[mirrored].path.endswith("__init__.py")
        is_package = mirrored in house.product and mirrored.endswith(f".{subject}")
        is_module = f"{mirrored}.{subject}" in house.product or f"{folder}.{subject}" in house.tests
        if is_aspect or is_package or is_module:
            continue
        needed.add(module.path)
        if module.path not in scenarios:
            yield Violation(
                module.path, 1, "test-place", f"there is no module {mirrored}.{subject}, nor is it listed"
            )
    for path in sorted(set(scenarios) - needed):
        yield Violation(_TABLES, 1, "test-place", f"the scenario {path} is not there or not needed")
    for path in sorted(folders):
        if not any(_is_test(module) and module.folder == path for module in house.tests.values()):
            yield Violation(_TABLES, 1, "test-place", f"the folder of scenarios {path} has no tests")


def _is_test(module: Module) -> bool:
    return module.file.startswith("test_")
