"""Computes logits with SGLang's Python: a standard-library script started by `sglang_engine.py`.

Lines of JSON in both directions:

    in   {...}                  arguments of SGLang's engine, once
    out  {"ready": true}        the model is loaded; or {"error": TEXT}
    in   [[token, ...], ...]    texts
    out  {"logits": [...]}      or {"error": TEXT}

When standard input ends, for example because the parent dies, this process and SGLang's are killed.
"""

import json
import os
import queue
import signal
import sys
import threading
from typing import Any


def main() -> None:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # redirect library output to the log, away from the answers
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), name="requests", daemon=True).start()
    arguments = json.loads(lines.get())
    try:
        engine = _start(arguments)
    except Exception as error:  # SGLang raises any exception
        _write(answers, {"error": f"{type(error).__name__}: {error}"})
        return
    _write(answers, {"ready": True})
    while True:
        texts = json.loads(lines.get())
        try:
            _write(answers, {"logits": _logits(engine, texts)})
        except Exception as error:
            _write(answers, {"error": f"{type(error).__name__}: {error}"})


def _start(arguments: dict[str, Any]) -> Any:
    import sglang  # type: ignore[import-not-found]  # in its own Python

    return sglang.Engine(**arguments)


def _logits(engine: Any, texts: list[list[int]]) -> list[float]:
    from sglang.srt.managers.io_struct import EmbeddingReqInput  # type: ignore[import-not-found]

    answer = engine.tokenizer_manager.generate_request(EmbeddingReqInput(input_ids=texts), None)
    reply = engine.loop.run_until_complete(answer.__anext__())
    return [float(one["embedding"][0]) for one in reply]


def _read(lines: "queue.SimpleQueue[str]") -> None:
    for line in sys.stdin:
        lines.put(line)
    os.killpg(os.getpgrp(), signal.SIGKILL)  # the parent started this process in its own group


def _write(answers: Any, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
