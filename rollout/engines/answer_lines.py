"""Serves an engine's answer parsers on standard input and output, with only the standard library.

The first line names the parsers and the model directory; the reply follows when they are loaded. Each further
line contains one answer to parse.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

Parse = Callable[[dict[str, Any]], dict[str, Any]]
"""Answer of the model -> its thoughts, content and tool calls."""


def serve_lines(load: Callable[[dict[str, Any]], Parse]) -> None:
    """Load the parsers, then parse line by line until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep output of the engine's libraries out of the replies

    def say(parsed: dict[str, Any]) -> None:
        answers.write(json.dumps(parsed) + "\n")
        answers.flush()

    try:
        parse = load(json.loads(sys.stdin.readline()))
    except Exception as error:  # engine libraries raise any exception
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


def check_names(engine: str, requested: dict[str, Any], known: dict[str, list[str]]) -> None:
    """Raise ValueError, listing the engine's parsers, if a given parser is unknown."""
    for kind, names in known.items():
        name = requested[kind]
        if name and name not in names:
            raise ValueError(
                f"{engine} has no parser for {kind} named {name!r}; it has {', '.join(sorted(names))}"
            )
