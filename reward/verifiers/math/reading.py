"""Parses an answer of `math` completely: its items, and the number, unit, letters or expression of each item.

math-verify searches for a number anywhere in a text, and extracts 7 from `3, 5, 7` and 5 from `6 - 5i`. This
module splits a text into items first, and each item is parsed as a whole.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from reward.verifiers.math.final_answer import unboxed

OPENING, CLOSING = "([{", ")]}"
EXPONENT = 300
"""Largest decimal exponent of a number that is parsed exactly."""
REPLACED = (
    (re.compile(r"\\(?:left|right|bigl?|bigr?|Bigl?|Bigr?|displaystyle)(?![a-zA-Z])\.?"), ""),
    (re.compile(r"\\(?:d|t|c)frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"(?<=\d)(?:\{,\}|\\!,?\\!|,\\!|\\,)(?=\d{3}(?!\d))"), ","),
    (re.compile(r"(?<!\\)\\[,;:! ]|\\q?quad(?![a-zA-Z])|~|\u00a0|\u202f"), " "),
    (re.compile(r"\\(?:text|mbox|textbf|textrm|mathrm|textit|mathbf)\s*\{([^{}]*)\}"), r" \\word{\1} "),
    (re.compile(r"\\word\{\s*(,?\s*(?:and|or)|,|;)\s*\}"), r" \1 "),
    (re.compile(r"\u2212|(?<![\d\s])\u2013(?=\d)|\A\u2013(?=\d)"), "-"),
    (re.compile(r"\\(?:leq|le)(?![a-zA-Z])|\u2264|<="), r"\\le "),
    (re.compile(r"\\(?:geq|ge)(?![a-zA-Z])|\u2265|>="), r"\\ge "),
    (re.compile(r"(?<=\d)\s*i(?![a-zA-Z])"), " i"),
    (re.compile(r"\\varnothing(?![a-zA-Z])"), r"\\emptyset"),
    (re.compile(r"\u00d7"), r"\\times "),
    (re.compile(r"\u00b7"), r"\\cdot "),
    (re.compile(r"\u03c0"), r"\\pi "),
    (re.compile(r"\u221e"), r"\\infty "),
    (re.compile(r"\u221a\s*\(([^()]*)\)|\u221a\s*(\d+|[a-z])"), r"\\sqrt{\1\2}"),
    (re.compile(r"\u00b0|\^\s*\{?\s*\\circ\s*\}?"), r"\\degree"),
)
"""Equivalent spellings of LaTeX and Unicode -> their normal form."""
DELIMITERS = re.compile(r"\\[()\[\]]|(?<!\\)\$")
SEPARATOR = re.compile(r"\s*(?:,\s*(?:and|or)\b|[,;]|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z]))\s*")
THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
NUMERAL = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)"
NUMBER = re.compile(
    rf"({NUMERAL})(?:[eE]([-+]?\d+)|\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?:\{{([-+]?\d+)\}}|(\d)))?",
    re.ASCII,
)
REPEATING = re.compile(r"([-+]?)(\d*)\.(\d*)\\overline\{(\d+)\}", re.ASCII)
RATIO_OF_NUMBERS = re.compile(
    rf"({NUMERAL})\s*/\s*({NUMERAL})|([-+]?)\\frac\s*(?:\{{\s*({NUMERAL})\s*\}}|(\d))\s*(?:\{{\s*({NUMERAL})\s*\}}|(\d))",
    re.ASCII,
)
MIXED = re.compile(
    r"([-+]?)(\d+)(?:\s+(\d+)\s*/\s*(\d+)|\s*\\frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d)))", re.ASCII
)
UNIT_BEFORE = re.compile(r"(-?)\s*(\\\$|[$\u20ac\u00a3\u00a5])\s*(?=[-\d.])")
UNIT_AFTER = re.compile(
    r"(?<=[\w)}.])\s*(\\degree|\\?%|\\\$|[$\u20ac\u00a3\u00a5]"
    r"|\\word\{[^{}]*\}(?:\s*\^\s*\{?\d\}?)?"
    r"|(?<=[\d\s)}])(?:[a-zA-Z]{2,}|[a-zA-Z]+/[a-zA-Z]+)[a-zA-Z/ ]*(?:\^\s*\{?\d\}?)?)\Z"
)
UNITS = {"degree": "degree", "\\degree": "degree", "\\%": "%", "percent": "%", "\\$": "$", "dollar": "$"}
FUNCTIONS = {
    "sin",
    "cos",
    "tan",
    "cot",
    "sec",
    "csc",
    "log",
    "ln",
    "exp",
    "sqrt",
    "pi",
    "max",
    "min",
    "gcd",
    "mod",
}
BASED = re.compile(r"([0-9A-Z.]+)\s*_\s*\{?\s*(?:\\word\{)?\s*(\w+)\s*\}?\s*\}?")
LETTERS = re.compile(
    r"\(?\s*(?:\\word\{)?\s*\(?\s*([A-Za-z]|[a-zA-Z']{2,}(?:[ -][a-zA-Z']+)*)\s*\)?\s*\}?\s*\)?"
)


@dataclass(frozen=True, slots=True)
class Item:
    """One value of an answer."""

    text: str
    """Normalized text without the unit."""
    unit: str = ""
    """Normalized unit; empty without one."""
    number: Fraction | None = None
    """Value, if the text is a numeral, a fraction or a mixed number."""
    decimal: bool = False
    """Whether the number was written with a decimal point or an exponent."""
    words: str = ""
    """Text for comparison as text, if the item is letters, words, or a number in a stated base."""


def normalized(text: str) -> str:
    """Return a text without box, delimiters, spacing commands and final punctuation."""
    text = DELIMITERS.sub("", unboxed(text.replace("\\$", "\\USD"))).replace("\\USD", "\\$")
    for pattern, by in REPLACED:
        text = pattern.sub(by, text)
    return " ".join(text.split()).rstrip(".,;: ").strip("* ")


def items(text: str) -> list[str]:
    """Return the items of a normalized list or set in order; one item for other text.

    A comma within brackets or in 1,234 does not separate items. An item with one plus-minus sign is two
    items.
    """
    if text.startswith("\\{") and text.endswith("\\}"):
        text = text[2:-2]
    text = THOUSANDS.sub(lambda match: match.group().replace(",", ""), text)
    parts, depth, start, i = [], 0, 0, 0
    while i < len(text):
        depth += (text[i] in OPENING or text.startswith("\\begin", i)) - (
            text[i] in CLOSING or text.startswith("\\end", i)
        )
        separator = SEPARATOR.match(text, i) if depth == 0 else None
        if separator and separator.end() > i:
            parts.append(text[start:i])
            i = start = separator.end()
        else:
            i += 1
    parts.append(text[start:])
    both = []
    for part in parts:
        signs = ("+", "-") if part.count("\\pm") == 1 else ("\\pm",)
        both += [part.replace("\\pm", sign).strip() for sign in signs]
    return [part for part in both if part]


def bracketed(text: str) -> tuple[str, list[str], str] | None:
    """Return (bracket, items, bracket) of a tuple or interval such as (3, 4]; None for other texts."""
    if len(text) < 2 or text[0] not in "([" or text[-1] not in ")]":
        return None
    depth = 0
    for i, character in enumerate(text):
        depth += (character in OPENING) - (character in CLOSING)
        if depth == 0 and i < len(text) - 1:
            return None
    inside = items(text[1:-1])
    return (text[0], inside, text[-1]) if len(inside) > 1 else None


def item(text: str) -> Item:
    """Parse one item."""
    based = BASED.fullmatch(text)
    if based and any(character.isdigit() for character in based[1]):
        return Item(text, words=f"{based[1]}_{based[2].lower()}")
    letters = LETTERS.fullmatch(text)
    if letters and letters[1] not in FUNCTIONS and letters[1] not in "eix":
        return Item(text, words=" ".join(letters[1].split()))
    value, unit = _split_unit(text)
    number, decimal = _number(value)
    return Item(value, unit, number, decimal)


def _split_unit(text: str) -> tuple[str, str]:
    """Return the value and normalized unit of an item."""
    before = UNIT_BEFORE.match(text)
    if before:
        text = before[1] + text[before.end() :]
    after = UNIT_AFTER.search(text)
    word = _unit(after[1]) if after else ""
    if not after or word in FUNCTIONS or (word.isalpha() and "\\" + word in text):
        return text, _unit(before[2]) if before else ""
    return text[: after.start()].strip(), word


def _unit(text: str) -> str:
    """Return a unit in lower case, in the singular, with powers as ^2."""
    text = re.sub(r"\\word\{([^{}]*)\}", r"\1", text).lower().strip(" .")
    text = re.sub(r"\s*\^\s*\{?(\d)\}?", r"^\1", text)
    text = re.sub(
        r"\b([a-z]{3,}?)s\b", r"\1", re.sub(r"\bfeet\b", "foot", re.sub(r"\binches\b", "inch", text))
    )
    text = re.sub(r"\bsquare (\w+)", r"\1^2", re.sub(r"\bcubic (\w+)", r"\1^3", text))
    return UNITS.get(text, text)


def _number(text: str) -> tuple[Fraction | None, bool]:
    """Return the value of a numeral, fraction or mixed number, and whether it is written as a decimal."""
    text = text.strip()
    if match := NUMBER.fullmatch(text):
        exponent = next((group for group in match.groups()[1:] if group), None)
        if exponent is not None and (len(exponent) > 4 or abs(int(exponent)) > EXPONENT):
            return None, False
        return Fraction(match[1]) * Fraction(10) ** int(exponent or 0), "." in match[1]
    if match := REPEATING.fullmatch(text):
        sign, whole, fixed, cycle = match.groups()
        value = Fraction(
            int(whole + fixed + cycle or 0) - int(whole + fixed or 0),
            (10 ** len(cycle) - 1) * 10 ** len(fixed),
        )
        return -value if sign == "-" else value, False
    if match := MIXED.fullmatch(text):
        top, bottom = (int(group) for group in match.groups()[2:] if group)
        if 0 < top < bottom:
            value = int(match[2]) + Fraction(top, bottom)
            return -value if match[1] == "-" else value, False
    if match := RATIO_OF_NUMBERS.fullmatch(text):
        over, under = (Fraction(group) for group in (*match.groups()[:2], *match.groups()[3:]) if group)
        if under:
            value = over / under
            return -value if match[3] == "-" else value, False
    return None, False
