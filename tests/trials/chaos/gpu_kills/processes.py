"""Finds the processes of a `tether up` that are killed."""

import contextlib
import re
from collections.abc import Iterator

import psutil

from tests.integration.command import service_of
from tests.trials.chaos.gpu_kills.layouts import Part, Target


def find_process(up: int, target: Target, trainer_ranks: int) -> psutil.Process | None:
    """Return the living process of a run that `target` names; None while there is none.

    Args:
        up: process id of `tether up`.
        target: what to find.
        trainer_ranks: of the run; with one, the trainer's service is its rank.
    """
    service = _service(up, "trainer" if target.part is Part.TRAINER else "rollout")
    if service is None:
        return None
    if target.part is Part.WORKER or (target.part is Part.TRAINER and trainer_ranks == 1):
        return service
    for matches in (_is_target, _is_untitled_core):
        for child in _children(service.pid, recursive=True):
            with contextlib.suppress(psutil.Error):  # it ends
                if matches(child, target):
                    return child
    return None


def is_engine_process(title: str, target: Target) -> bool:
    """Return whether vLLM has given a process this title, of the core or of a rank."""
    if target.part is Part.CORE:
        return title.startswith("VLLM::EngineCore")
    return re.match(rf"VLLM::Worker\w*_TP{target.rank}(_|$)", title) is not None


def _is_target(process: psutil.Process, target: Target) -> bool:
    words = process.cmdline()
    if target.part is Part.TRAINER:
        return "services.trainer" in words and process.environ().get("RANK") == str(target.rank)
    return bool(words) and is_engine_process(words[0], target)


def _is_untitled_core(process: psutil.Process, target: Target) -> bool:
    """Return whether a process is an engine core without a title: it starts, or was forked from a server."""
    line, above = " ".join(process.cmdline()), process.parent()
    if target.part is not Part.CORE or above is None:
        return False
    if "multiprocessing.forkserver" in line:
        return "multiprocessing.forkserver" in " ".join(above.cmdline())
    return "spawn_main" in line and "services.rollout" in above.cmdline()


def _service(up: int, role: str) -> psutil.Process | None:
    for child in _children(up):
        with contextlib.suppress(psutil.Error):
            if service_of(child.pid).partition(".")[0] == role:
                return child
    return None


def _children(pid: int, *, recursive: bool = False) -> Iterator[psutil.Process]:
    """Yield the living processes below one."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive):
            if child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
                yield child
