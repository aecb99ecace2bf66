"""The trainer's process as the engine's side sees it: orders out, answers in, one at a time."""

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu.shapes import SIZES

ROOT = Path(__file__).resolve().parents[3]
MAX_ANSWER = 64 << 20
"""Bytes; a manifest of a thousand tensors has a fraction of a megabyte."""
END_S = 10.0
SAME = "@same"
"""At the end of a part's name: the trainer is on the engine's GPU."""


class Partner:
    """A running trainer. Made by `start`."""

    def __init__(self, process: asyncio.subprocess.Process, weights: Mapping[str, Any]) -> None:
        self._process = process
        self._free = asyncio.Lock()
        self.bytes = int(weights["bytes"])
        self.shapes: list[tuple[str, list[int]]] = weights["shapes"]

    @classmethod
    async def start(cls, model: str, model_dir: Path, devices: str, limit_s: float) -> "Partner":
        """Start a trainer that sees `devices` (CUDA_VISIBLE_DEVICES), its own first.

        Raises:
            RuntimeError: if it does not come up within `limit_s`.
        """
        command = (
            "-m",
            "tests.benchmarks.gpu.trainer",
            "--model",
            str(model_dir),
            "--dtype",
            SIZES[model].dtype,
            *([] if SIZES[model].held else ["--on-host"]),
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            cwd=ROOT,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": devices},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=MAX_ANSWER,
        )
        try:
            async with asyncio.timeout(limit_s):
                return cls(process, await _answer(process))
        except BaseException:
            await _end(process)
            raise

    async def ask(self, do: str, limit_s: float = 120.0, **order: Any) -> dict[str, Any]:
        """What the trainer answers to an order.

        Raises:
            RuntimeError: with the trainer's own reason, or if it has exited.
        """
        assert self._process.stdin is not None
        async with self._free, asyncio.timeout(limit_s):
            self._process.stdin.write(json.dumps({"do": do, **order}).encode() + b"\n")
            await self._process.stdin.drain()
            return await _answer(self._process)

    async def close(self) -> None:
        """End it."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        await _end(self._process)


async def _answer(process: asyncio.subprocess.Process) -> dict[str, Any]:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise RuntimeError("the trainer's process is gone")
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise RuntimeError(f"trainer: {answer['error']}")
    return answer


async def _end(process: asyncio.subprocess.Process) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            await process.wait()
    if process.returncode is None:
        process.kill()
        await process.wait()
