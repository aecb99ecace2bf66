"""Tells an engine's refusal of its settings at its start from a failure that another start may not have."""

import re
from collections.abc import Iterable

import torch

REFUSALS = frozenset(
    {"AssertionError", "AttributeError", "KeyError", "NotImplementedError", "TypeError", "ValueError"}
)
"""Errors that another start would end with, too, unless they are about memory, which may be free by then."""
RAISED = re.compile(r"^(?:\w+\.)*(\w+(?:Error|Exception)): ?(.*)$", re.MULTILINE)
"""The line of a traceback in a log that has the error."""
IGNORED = re.compile(
    r"^Exception ignored (?:in|while)\b.*\n(?:Traceback .*\n)?(?:[ \t].*\n)*(?:\S.*)?", re.MULTILINE
)
"""Python's words about an error that cannot be caught, as in a `__del__` while a process ends."""
PASSING = re.compile(
    r"out of memory|\bat \d+ is not available|used by a process already|port is already in use"
)
"""Want of memory or of a port, which may be free at another start, in lower case."""


def is_refusal(kinds: Iterable[str], text: str) -> bool:
    """Return whether an error at the start of an engine is about its settings or its model.

    Args:
        kinds: names of the error's class and of those that it inherits from.
        text: the error's.
    """
    said = text.lower()
    # on a CPU a cache has the size that is asked for, and too little room in it is no matter of time
    is_about_memory = "free memory" in said or ("memory" in said and torch.cuda.is_available())
    return not REFUSALS.isdisjoint(kinds) and not is_about_memory


def refusal_in(log: str) -> str:
    """Return the last error in the log of an engine that has ended, if it is a refusal; otherwise "".

    It is none if any error is of want of memory or of a port.

    Args:
        log: of all of its processes; one may report the end of another.
    """
    found = [(kind, text) for kind, text in RAISED.findall(IGNORED.sub("", log)) if text]
    # other processes end with errors of their own after the first
    is_passing = any(kind == "OutOfMemoryError" or PASSING.search(text.lower()) for kind, text in found)
    if not found or is_passing:
        return ""
    kind, text = found[-1]
    return f"{kind}: {text}" if is_refusal((kind,), text) else ""
