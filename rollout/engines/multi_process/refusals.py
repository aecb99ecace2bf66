"""Distinguishes an engine's rejection of its settings from start failures that a retry may avoid."""

import re
from collections.abc import Iterable

import torch

REFUSALS = frozenset(
    {"AssertionError", "AttributeError", "KeyError", "NotImplementedError", "TypeError", "ValueError"}
)
"""Exception types that another start would raise again, except memory errors, because memory may be freed."""
RAISED = re.compile(r"^(?:\w+\.)*(\w+(?:Error|Exception)): ?(.*)$", re.MULTILINE)
"""Line of a traceback in a log that contains the error."""
IGNORED = re.compile(
    r"^Exception ignored (?:in|while)\b.*\n(?:Traceback .*\n)?(?:[ \t].*\n)*(?:\S.*)?", re.MULTILINE
)
"""Python's message about an uncatchable error, such as in `__del__` at process exit."""
PASSING = re.compile(
    r"out of memory|\bat \d+ is not available|used by a process already|port is already in use"
)
"""Lack of memory or of a port, which may be transient; matched in lower case."""


def is_refusal(kinds: Iterable[str], text: str) -> bool:
    """Return whether a start error is caused by the engine's settings or model.

    Args:
        kinds: names of the exception's class and base classes.
        text: error message.
    """
    lowered = text.lower()
    # on CPU the cache has a fixed size, so a too small cache is a permanent error
    is_about_memory = "free memory" in lowered or ("memory" in lowered and torch.cuda.is_available())
    return not REFUSALS.isdisjoint(kinds) and not is_about_memory


def refusal_in(log: str) -> str:
    """Return the last error in the log of an ended engine if it is a rejection of its settings; otherwise "".

    If any error is a lack of memory or of a port, the result is "".

    Args:
        log: log of all processes of the engine; one may report the end of another.
    """
    found = [(kind, text) for kind, text in RAISED.findall(IGNORED.sub("", log)) if text]
    # other processes end with follow-up errors
    is_passing = any(kind == "OutOfMemoryError" or PASSING.search(text.lower()) for kind, text in found)
    if not found or is_passing:
        return ""
    kind, text = found[-1]
    return f"{kind}: {text}" if is_refusal((kind,), text) else ""
