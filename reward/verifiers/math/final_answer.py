"""Extracts the final answer from a response: a box, the text after "answer is", or the last formula."""

import re

LONGEST = 1000
"""Maximum length of an answer, characters. An answer without a box is searched in that many last
characters."""
BOXED = "\\boxed{"
BETWEEN = re.compile(r"\s*(?:\$|\\\)|\\\])?\s*,?\s*(?:and|or|,)\s*(?:\$|\\\(|\\\[)?\s*")
"""Text between boxes that together are one answer."""
GAP = 20
"""Maximum number of characters between boxes of one answer."""
BEFORE = re.compile(r"(?:\$\$?|\\\(|\\\[)\s*\Z")
AFTER = re.compile(r"(?:\s{0,9}(?:\$\$?|\\\)|\\\]))?(?:\s{0,9}\\?%)?")
THOUGHT = "</think>"
MARK = re.compile(r"answer(?:\s+is|\s*:|\s+is\s*:)[\s*]*|####\s*", re.IGNORECASE)
"""Words that announce an answer without a box."""
SENTENCE_END = re.compile(r"[.!?](?=\s|\Z)|\n|,?\s(?:because|since|which|where|so|as|I hope)\b")
FORMULA = re.compile(r"\$\$.+?\$\$|\\\[.+?\\\]|\\\(.+?\\\)|(?<!\\)\$[^$\n]+?(?<!\\)\$", re.DOTALL)
TOKEN = re.compile(r"[^\s$]*\d[^\s$]*|\\frac\S+")
"""Piece of text that contains a number."""
CONNECTED = re.compile(
    r"(?:\S*\d\S*\s*(?:,\s*(?:and|or)?|and|or)|\d+|\S*\d\s*[-+*/=^<>\u2264\u2265]|[-+])\s*\Z"
)
"""Text before a number that belongs to the same expression: a list, a mixed number, an operator."""
PUNCTUATION = ".,;:!?*\"'"


def final_answer(response: str) -> str:
    """Return the text of the final answer, with its delimiters; empty if the response has none.

    The answer is the last box, unless "final answer is" follows the box. Without a box, the answer is the
    text from the last "answer is", "answer:" or "####" to the end of the sentence. Otherwise, the answer is
    the last formula in delimiters or the last number, whichever comes later, with the list or sum around it.
    Text up to </think> is ignored if text follows.
    """
    response = _after_thought(response)
    start = response.rfind(BOXED)
    if start < 0 or response.rfind("inal answer is") > start:
        return _without_box(response[-LONGEST:])
    first, end = start, _end_of_box(response, start)
    for _ in range(5):  # 1 and 2, each in a box, form one answer of two parts
        earlier = response.rfind(BOXED, 0, first)
        gap = _end_of_box(response, earlier) if earlier >= 0 else -GAP
        if first - gap > GAP or not BETWEEN.fullmatch(response, gap, first):
            break
        first = earlier
    before = BEFORE.search(response, max(0, first - 8), first)
    after = AFTER.match(response, end)
    return response[before.start() if before else first : after.end() if after else end]


def unboxed(text: str) -> str:
    """Return a text with each box replaced by its content. An unclosed box extends to the end of the text."""
    while (start := text.find(BOXED)) >= 0:
        end = _end_of_box(text, start)
        inside = text[start + len(BOXED) : end]
        is_closed = inside.count("{") + 1 == inside.count("}")
        text = text[:start] + (inside[:-1] if is_closed else inside) + text[end:]
    return text


def _after_thought(response: str) -> str:
    answer = response.rpartition(THOUGHT)[2]
    return answer if answer.strip() else response


def _without_box(text: str) -> str:
    """Return the answer in a text without a box."""
    marks = list(MARK.finditer(text))
    if marks:
        rest = text[marks[-1].end() :]
        formula = FORMULA.match(rest)
        from_ = formula.end() if formula else 0
        end = SENTENCE_END.search(rest, from_)
        answer = rest[: end.start() if end else len(rest)]
        if answer.strip(PUNCTUATION + " "):
            return answer.strip().strip(PUNCTUATION)
    formulas = list(FORMULA.finditer(text))
    rest_start = formulas[-1].end() if formulas else 0
    numbers = list(TOKEN.finditer(text, rest_start))
    if not numbers:
        return formulas[-1].group() if formulas else ""
    start = numbers[-1].start()
    while connected := CONNECTED.search(text, rest_start, start):
        if connected.start() == start:
            break
        start = connected.start()
    return text[start : numbers[-1].end()].strip(PUNCTUATION).rpartition("=")[2].strip()


def _end_of_box(text: str, start: int) -> int:
    """Return the end of the box that begins at `start`, or a position beyond `LONGEST` characters."""
    depth = 0
    limit = min(len(text), start + LONGEST + 1)
    for i in range(start + len(BOXED) - 1, limit):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return i + 1
    return limit
