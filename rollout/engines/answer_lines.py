"""Serves an engine's parsers of answers on standard input and output; needs the standard library alone.

The first line names the parsers and the model directory and is answered when they are loaded. Each further
line has an answer of the model.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

Parse = Callable[[dict[str, Any]], dict[str, Any]]
"""An answer of the model -> its thoughts, content and calls."""


def serve_lines(load: Callable[[dict[str, Any]], Parse]) -> None:
    """Load parsers and parse line by line, until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints of the engine's libraries are no answers

    def say(parsed: dict[str, Any]) -> None:
        answers.write(json.dumps(parsed) + "\n")
        answers.flush()

    try:
        parse = load(json.loads(sys.stdin.readline()))
    except Exception as error:  # an engine's library raises anything
        say({"refused": str(error)[:2000] or repr(error)})
        return
    say({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            parsed = parse(request)
        except Exception as error:
            parsed = {"failed": repr(error)[:300]}
        say({**parsed, "number": request["number"]})


def check_names(engine: str, given: dict[str, Any], known: dict[str, list[str]]) -> None:
    """Raise ValueError, with the engine's parsers, if a parser is not among them."""
    for kind, names in known.items():
        if given[kind] and given[kind] not in names:
            raise ValueError(
                f"{engine} has no parser for {kind} named {given[kind]!r}; it has {', '.join(sorted(names))}"
            )
