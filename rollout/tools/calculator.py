"""Evaluates arithmetic: numbers, + - * / // % **, parentheses; one expression per line."""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from rollout.tools.base import Tool

MAX_CHARACTERS = 1000
MAX_DIGITS = 300
"""Maximum digits of a number; larger results are refused, before the computation if possible."""

BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class Calculator(Tool):
    """Tool `calculator`, without names and function calls."""

    async def run(self, text: str) -> str:
        return calculate(text)


def calculate(text: str) -> str:
    """Return the value or error of each line; texts over `MAX_CHARACTERS` are refused."""
    if len(text) > MAX_CHARACTERS:
        return f"error: more than {MAX_CHARACTERS} characters"
    return "\n".join(_line(line) for line in text.splitlines() if line.strip()) or "error: nothing to compute"


def _line(line: str) -> str:
    plain = re.sub(r"(?<=\d),(?=\d{3})|[$=]", "", line).replace("×", "*").replace("÷", "/").strip()
    try:
        value = _value(ast.parse(plain, mode="eval").body)
    except (ArithmeticError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        return f"error: {error}"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in UNARY:
            return _bounded(UNARY[type(op)](_value(operand)))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
            first, second = _value(left), _value(right)
            if isinstance(op, ast.Pow):
                _check_power(first, second)
            return _bounded(BINARY[type(op)](first, second))
    raise ValueError("only numbers, + - * / // % ** and parentheses")


def _check_power(base: float, exponent: float) -> None:
    """Raise ValueError for a power that is too large to compute."""
    if base and abs(exponent) * len(str(abs(int(base)))) > MAX_DIGITS:
        raise ValueError("the power is too large")


def _bounded(value: Any) -> int | float:
    if not isinstance(value, (int, float)):
        raise ValueError("the result is not a real number")
    if isinstance(value, int) and value.bit_length() > MAX_DIGITS * 10 // 3:
        raise ValueError("the number is too large")
    return value
