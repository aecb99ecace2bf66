"""Injects one bug into a program: a seed selects a node of its syntax tree and the change."""

import ast
import copy
import random
from collections.abc import Callable, Mapping

SWAPPED: Mapping[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
"""Operator -> replacement in a bug."""
CALLS = {"max": "min", "min": "max"}


def sites(tree: ast.AST) -> list[Callable[[], int]]:
    """Return the possible changes of a tree; each applies its change and returns the line number."""
    found: list[Callable[[], int]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "solve":
            continue
        match node:
            case ast.BinOp() | ast.BoolOp() | ast.AugAssign() if type(node.op) in SWAPPED:
                found.append(lambda node=node: _swap(node))  # type: ignore[misc]
            case ast.Compare(ops=[op]) if type(op) in SWAPPED:
                found.append(lambda node=node: _swap_comparison(node))  # type: ignore[misc]
            case ast.Constant(value=int()) if not isinstance(node.value, bool):
                found.append(lambda node=node: _increase(node))  # type: ignore[misc]
            case ast.Call(func=ast.Name(id=name)) if name in CALLS:
                found.append(lambda node=node: _call_other(node))  # type: ignore[misc]
    return found


def mutant(source: str, generator: random.Random) -> tuple[str, int]:
    """Return a program with a bug, and the line number of the bug, from 1.

    The program must be formatted by `ast.unparse`, so that only this line differs.
    """
    tree = copy.deepcopy(ast.parse(source))
    line = generator.choice(sites(tree))()
    return ast.unparse(tree), line


def _swap(node: ast.BinOp | ast.BoolOp | ast.AugAssign) -> int:
    node.op = SWAPPED[type(node.op)]()  # type: ignore[assignment]
    return node.lineno


def _swap_comparison(node: ast.Compare) -> int:
    node.ops = [SWAPPED[type(node.ops[0])]()]  # type: ignore[list-item]
    return node.lineno


def _increase(node: ast.Constant) -> int:
    assert isinstance(node.value, int)
    node.value += 1
    return node.lineno


def _call_other(node: ast.Call) -> int:
    assert isinstance(node.func, ast.Name)
    node.func.id = CALLS[node.func.id]
    return node.lineno
