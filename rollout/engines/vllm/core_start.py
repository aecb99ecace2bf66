"""Reports the error of vLLM's failed engine process to the process that started it.

vLLM itself reports only that its engine process failed, and writes the error to the log.
"""

import functools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from protocol.errors import EngineError, EngineSettingsError
from rollout.engines.multi_process.refusals import is_refusal


@contextmanager
def reported_start(model: str) -> Iterator[None]:
    """Start vLLM in the block, and raise an error of its engine process here.

    Args:
        model: model directory, for the error.

    Raises:
        EngineError: vLLM's start failed; the message contains its reason. EngineSettingsError: vLLM rejects
            arguments or model.
    """
    from vllm.v1.engine.core import EngineCoreProc

    with tempfile.TemporaryDirectory(prefix="tether-start-") as directory:
        report = Path(directory) / "error"
        run = EngineCoreProc.run_engine_core
        by_us = run if isinstance(run, functools.partial) else None  # `eager_core` also replaces it
        EngineCoreProc.run_engine_core = functools.partial(run_core, str(report), by_us)
        try:
            yield
        except Exception as error:  # vLLM raises many exception types; all mean that the start failed
            kind, text = _read(report) or (_kind(error), str(error))
            raise kind(f"vLLM cannot serve {model}: {' '.join(text.split())}") from error
        finally:
            EngineCoreProc.run_engine_core = run


def run_core(report: str, run: Callable[..., None] | None, *args: Any, **kwargs: Any) -> None:
    """Run vLLM's engine process by `run` or vLLM's own function; also write errors to the file `report`."""
    try:
        if run is None:
            from vllm.v1.engine.core import EngineCoreProc

            run = EngineCoreProc.run_engine_core
        run(*args, **kwargs)
    except Exception as error:
        place = Path(report)
        if place.parent.is_dir():  # after the start, vLLM reports errors itself
            place.write_text(f"{_kind(error).__name__}\n{type(error).__name__}: {error}")
        raise


def _read(report: Path) -> tuple[type[EngineError], str] | None:
    """Return the error written by the engine process; None if there is none."""
    if not report.is_file():
        return None
    name, _, text = report.read_text().partition("\n")
    return (EngineSettingsError if name == EngineSettingsError.__name__ else EngineError), text


def _kind(error: Exception) -> type[EngineError]:
    kinds = [kind.__name__ for kind in type(error).__mro__]
    return EngineSettingsError if is_refusal(kinds, str(error)) else EngineError
