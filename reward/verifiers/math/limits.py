"""Bounds the cost of an answer before it is parsed or compared.

math-verify computes numbers exactly and tries many parses of nested brackets. 9^{9^{9^9}} or 3,000 brackets
would exceed any time limit.
"""

import re

from reward.verifiers.math.final_answer import LONGEST

DEPTH = 12
"""Maximum nesting depth of brackets."""
DIGITS = 500
"""Maximum number of digits of one number."""
EXPONENT = 3000
"""Largest product of the numbers in an exponent."""
POLYNOMIAL = 200
"""Largest exponent of brackets that contain letters."""
POWERS = 100_000
"""Largest product of an exponent, the exponents of brackets, and the longest number's digits / 20."""
CHOOSE = 10_000
"""Exclusive limit of numbers in a factorial, a binomial coefficient, a sum or a product."""
NUMBER = re.compile(r"\d+", re.ASCII)
OPENING, CLOSING = "([{", ")]}"
COSTLY = re.compile(r"\\(?:binom|dbinom|tbinom|choose|sum|prod|int|lim)(?![a-zA-Z])")
MAX_COSTLY = 2
"""Maximum number of sums, products, integrals, limits and binomial coefficients in one answer."""


def why_too_costly(text: str) -> str:
    """Return the limit that an expression exceeds; empty if none."""
    text = text.replace("**", "^")
    if len(text) > LONGEST:
        return f"{len(text)} characters"
    if any(len(digits) > DIGITS for digits in NUMBER.findall(text)):
        return f"a number of over {DIGITS} digits"
    pairs = _brackets(text)
    if pairs is None:
        return f"brackets over {DEPTH} deep"
    if len(COSTLY.findall(text)) > MAX_COSTLY:
        return f"more than {MAX_COSTLY} sums, products, integrals or binomial coefficients"
    if COSTLY.search(text) and _largest(text) >= CHOOSE:
        return f"a sum, product or binomial coefficient with a number of {CHOOSE} or more"
    return _factorial_problem(text, pairs) or _power_problem(text, pairs)


def _brackets(text: str) -> dict[int, int] | None:
    """Return opening -> closing bracket positions; None if nested too deeply."""
    stack: list[int] = []
    pairs = {}
    for i, character in enumerate(text):
        if character in OPENING:
            stack.append(i)
            if len(stack) > DEPTH:
                return None
        elif character in CLOSING and stack:
            pairs[stack.pop()] = i
    return pairs


def _factorial_problem(text: str, pairs: dict[int, int]) -> str:
    """Return why a factorial is too large. In text without LaTeX, "!" is an exclamation mark."""
    if not re.search(r"[$\\\[]", text):
        return ""
    opening = {closed: opened for opened, closed in pairs.items()}
    for place in (i for i, character in enumerate(text) if character == "!"):
        before = text[:place].rstrip()
        number = re.search(r"\d+\Z", before)
        start = opening.get(len(before) - 1, number.start() if number else len(before))
        operand = before[start:]
        if before.endswith("!") or before[:start].rstrip().endswith("^"):
            return "a factorial of a factorial or power"
        if re.search(r"[!^*(\[{]|\\times|\\cdot", operand[1:]) or _largest(operand) >= CHOOSE:
            return f"the factorial of an expression, or of a number of {CHOOSE} or more"
    return ""


def _power_problem(text: str, pairs: dict[int, int]) -> str:
    """Return why powers have too many digits. Exponents of powers in brackets multiply."""
    opening = {closed: opened for opened, closed in pairs.items()}
    bracket_powers, largest = 1, 1
    for place in (i for i, character in enumerate(text) if character == "^"):
        exponent = _exponent(text, place + 1, pairs)
        size = 1
        for part in reversed(exponent.split("^")):
            size = min(_product(part) ** min(size, 64), EXPONENT + 1)
        if size > EXPONENT or ("!" in exponent and NUMBER.search(exponent)):
            return f"an exponent over {EXPONENT}"
        base = text[:place].rstrip()
        largest = max(largest, size)
        if base[-1:] in (")", "]", "}", "!"):
            bracket_powers *= size
            inside = base[opening.get(len(base) - 1, len(base)) :]
            if size > POLYNOMIAL and re.search(r"[a-zA-Z]", inside):
                return f"a polynomial to a power over {POLYNOMIAL}"
    longest = max((len(digits) for digits in NUMBER.findall(text)), default=1)
    if bracket_powers * largest * max(1, longest // 20) > POWERS:
        return f"powers of powers over {POWERS}"
    is_large = bool(re.search(r"\d\s*[)\]}]*\s*!|binom|choose", text))
    return "a power of a factorial or binomial coefficient" if is_large and largest > 20 else ""


def _exponent(text: str, start: int, pairs: dict[int, int]) -> str:
    """Return the exponent that begins at `start`, including a chain such as 2^3^4."""
    while start < len(text) and text[start].isspace():
        start += 1
    if start in pairs:
        end = pairs[start] + 1
    else:
        match = re.compile(r"[-+]?(?:\d+|\\[a-zA-Z]+|.)?", re.ASCII | re.DOTALL).match(text, start)
        end = match.end() if match else start
    rest = text[end:].lstrip()
    if rest.startswith("^"):
        return text[start:end] + "^" + _exponent(text, len(text) - len(rest) + 1, pairs)
    return text[start:end]


def _product(text: str) -> int:
    """Return the product of the numbers in a text, cut off above `EXPONENT`; 1 without numbers."""
    product = 1
    for digits in NUMBER.findall(text):
        product *= max(1, _value(digits))
        if product > EXPONENT:
            break
    return product


def _largest(text: str) -> int:
    return max((_value(digits) for digits in NUMBER.findall(text)), default=0)


def _value(digits: str) -> int:
    """Return the number; 10**10 for ten or more digits."""
    return int(digits) if len(digits) < 10 else 10**10
