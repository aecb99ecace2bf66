"""Rules of imports that import-linter does not know: siblings, cycles, doors of the processes."""

from collections.abc import Iterator, Mapping

from tests.house.source import House, Import, Violation

PROCESSES = ("services.rollout", "services.trainer", "services.ingest", "services.monitor")
"""Packages that are one process each; their door is `serve`."""
MONITOR_COMMAND = ("services.cli", "services.monitor", "run_monitor")
"""`tether monitor` serves the page of the monitor without the process: importer, package, name."""


def sibling_type_checking(house: House) -> Iterator[Violation]:
    """Find imports of a module of the same package below `if TYPE_CHECKING`: two halves of one class."""
    for module in house.product.values():
        for found in house.imports(module):
            if found.type_checking and found.target.rpartition(".")[0] == module.name.rpartition(".")[0]:
                message = f"imports its sibling {found.target} below TYPE_CHECKING"
                yield Violation(module.path, found.line, "sibling-type-checking", message)


def import_cycle(house: House) -> Iterator[Violation]:
    """Find modules that import each other, imports inside functions included."""
    graph = {
        module.name: sorted({found.target for found in house.imports(module)} - {module.name})
        for module in house.product.values()
    }
    for cycle in _components(graph):
        if len(cycle) > 1:
            message = f"import each other: {', '.join(sorted(cycle))}"
            yield Violation(house.product[min(cycle)].path, 1, "import-cycle", message)


def process_door(house: House) -> Iterator[Violation]:
    """Find imports that reach past the door of a process.

    No module of services/ imports another process; everybody else imports the package, or `serve` of it. The
    tests in tests/services/ may import everything.
    """
    for module in house.modules.values():
        for found in house.imports(module):
            process = next((name for name in PROCESSES if _is_in(found.target, name)), None)
            if process is None or _is_in(module.name, process) or _is_in(module.name, "tests.services"):
                continue
            if (module.name, found.target, found.name) == MONITOR_COMMAND:
                continue
            if _is_in(module.name, "services"):
                message = f"imports {found.target}: services do not import each other's process"
            elif _is_past_door(found, process):
                message = f"imports {found.target}: the door of {process} is `serve`"
            else:
                continue
            yield Violation(module.path, found.line, "process-door", message)


def _is_past_door(found: Import, process: str) -> bool:
    return found.target != process or found.name not in (None, "serve")


def _is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def _components(graph: Mapping[str, list[str]]) -> Iterator[list[str]]:
    """Yield the strongly connected components of a graph (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    waiting: set[str] = set()

    def visit(node: str) -> Iterator[list[str]]:
        index[node] = low[node] = len(index)
        stack.append(node)
        waiting.add(node)
        for target in graph.get(node, ()):
            if target not in index:
                yield from visit(target)
                low[node] = min(low[node], low[target])
            elif target in waiting:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            component: list[str] = []
            while not component or component[-1] != node:
                component.append(stack.pop())
                waiting.discard(component[-1])
            yield component

    for node in graph:
        if node not in index:
            yield from visit(node)
