"""A rank other than 0 that can say how much memory a publication takes, and that can wait for commands in two
ways.

`Executor.follow` waits for a command of rank 0 at torchrun's store. With `host` the rank waits for a line on
its socket first.
"""

import json
import socket
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from trainer.execution import executor
from trainer.execution.commands import AnyCommand, next_command
from trainer.roles.models import RankModels
from trainer.weights.base import WeightSender

WAIT_S = 600.0


class Memory:
    """What this process has allocated on its device, in bytes; zeros without a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base = 0

    def mark(self) -> None:
        """Measure peaks from now on."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._base = torch.cuda.memory_allocated(self._device)

    def found(self) -> dict[str, int]:
        """Return what was allocated at the mark, what is now, and the most in between."""
        if self._device.type != "cuda":
            return {"before": 0, "after": 0, "peak": 0}
        return {
            "before": self._base,
            "after": torch.cuda.memory_allocated(self._device),
            "peak": torch.cuda.max_memory_allocated(self._device),
        }


class Follower:
    """Follows rank 0, and answers lines of JSON on a socket of its own."""

    def __init__(self, rank: int, memory: Memory, sockets: Path, perturb: Callable[[float], None]) -> None:
        self._memory, self._perturb = memory, perturb
        self._host = False
        self._permits = threading.Semaphore(0)
        self._waiting = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(sockets / str(rank)))
        self._listener.listen(1)

    def follow(self, models: RankModels, sender: WeightSender | None) -> None:
        """Carry out what rank 0 commands, until it says exit."""
        threading.Thread(target=self._answer, name="answers", daemon=True).start()
        executor.next_command = self._next  # type: ignore[assignment]
        executor.Executor(models, sender).follow()

    def _next(self) -> AnyCommand:
        self._waiting.set()
        if self._host and not self._permits.acquire(timeout=WAIT_S):
            raise TimeoutError(f"rank 0 has commanded nothing for {WAIT_S:g} s")
        command = next_command()
        self._waiting.clear()
        return command

    def _answer(self) -> None:
        connection, _ = self._listener.accept()
        with closing(connection), connection.makefile("rw") as lines:
            for line in lines:
                lines.write(json.dumps(self._do(json.loads(line))) + "\n")
                lines.flush()

    def _do(self, order: dict[str, Any]) -> dict[str, Any]:
        match order["do"]:
            case "go":  # a command comes
                if self._host:
                    self._permits.release()
            case "wait":  # where; a command to be idle follows, so that the next wait is there
                was_host, self._host = self._host, order["where"] == "host"
                if was_host:
                    self._permits.release()
            case "mark":
                if not self._waiting.wait(WAIT_S):  # the step is over here, too
                    raise TimeoutError("the step does not end")
                self._memory.mark()
            case "perturb":
                self._perturb(order["factor"])
            case "memory":
                return self._memory.found()
        return {}
