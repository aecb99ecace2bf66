"""The engine's side: starts one engine and measures updates by the trainer that runs beside it.

    python -m tests.benchmarks.gpu_reshard.session --engine vllm --ranks 2 --model 7b --model-dir DIR
    --trainer SOCKET

Says what happens by lines of JSON on stdout, as `tests.benchmarks.gpu.session` does. Each part is a way in
which the trainer's other ranks wait for commands: on the GPU, as they do today, or on the host.
"""

import argparse
import asyncio
import faulthandler
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from protocol.messages import WeightManifest
from rollout.engines.multi_process.engine import MultiProcessEngine
from tests.benchmarks.gpu.measure import measure
from tests.benchmarks.gpu.session import reason, say
from tests.benchmarks.gpu.shapes import SIZES
from tests.benchmarks.gpu.updates import Ours
from tests.benchmarks.gpu_reshard.engines import MeasuredEngine, MeasuredSglang, config_of, start_engine

LONGEST_LINE = 64 << 20
WAITS = ("host", "gpu")


class Trainer:
    """Rank 0 of the trainer at the other end of a socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._free = asyncio.Lock()

    @classmethod
    @asynccontextmanager
    async def connected(cls, path: Path) -> AsyncIterator["Trainer"]:
        """Connect inside the block."""
        reader, writer = await asyncio.open_unix_connection(str(path), limit=LONGEST_LINE)
        try:
            yield cls(reader, writer)
        finally:
            writer.close()

    async def ask(self, do: str, limit_s: float = 120.0, **order: Any) -> dict[str, Any]:
        """What it answers to an order.

        Raises:
            RuntimeError: with the trainer's own reason, or if it has exited.
        """
        async with self._free, asyncio.timeout(limit_s):
            self._writer.write(json.dumps({"do": do, **order}).encode() + b"\n")
            await self._writer.drain()
            line = await self._reader.readline()
        if not line:
            raise RuntimeError("the trainer is gone")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"trainer: {answer['error']}")
        return answer


class Resharded(Ours):
    """The project's own way, from a trainer whose sender is open already."""

    def __init__(self, engine: MultiProcessEngine, trainer: Trainer, ranks: int) -> None:
        super().__init__(engine, trainer, "")
        self._ranks = ranks
        self.peaks: list[list[dict[str, int]]] = []
        """Memory of each rank of the trainer, by update."""

    async def prepare(self) -> None:
        """Do nothing."""

    async def update(self, version: int) -> tuple[list[Any], dict[str, float]]:
        found = await super().update(version)
        self.peaks.append((await self._partner.ask("memory"))["ranks"])
        return found

    async def verify(self) -> bool:
        """Whether the live weights are the trainer's, which are gathered once more for that."""
        manifest: WeightManifest | None = self._manifest
        expected = await self._partner.ask("digest", ranks=self._ranks)
        return (
            manifest is not None
            and manifest.digest == expected["version"]
            and await self._engine.live_digest() == expected["live"]
        )

    def memory(self) -> list[dict[str, int]]:
        """For each rank of the trainer the bytes at the end of a step, and the most more while publishing."""
        return [
            {
                "before": max(row[rank]["before"] for row in self.peaks),
                "extra": max(row[rank]["peak"] - row[rank]["before"] for row in self.peaks),
            }
            for rank in range(len(self.peaks[0]))
        ]


async def run(arguments: argparse.Namespace, directory: Path) -> None:
    """Start the engine, measure, end."""
    began = time.monotonic()
    config = config_of(
        arguments.engine,
        arguments.ranks,
        arguments.model,
        directory / "steps",
        graphs=arguments.graphs,
        memory=arguments.memory_fraction,
    )
    async with Trainer.connected(arguments.trainer) as trainer:
        await trainer.ask("wait", where="host")  # it disturbs the start less
        try:
            engine = await start_engine(config, arguments.model_dir)
        except Exception as error:
            say("fail", part="engine", error=reason(error))
            raise
        try:
            say("ready", start_s=time.monotonic() - began, graphs=arguments.graphs)
            for where in arguments.waits:
                say("begin", part=where)
                try:
                    say("end", part=where, result=await _part(arguments, engine, trainer, where))
                except Exception as error:
                    traceback.print_exception(error)
                    say("fail", part=where, error=reason(error))
                    raise
        finally:
            await engine.close()


async def _part(
    arguments: argparse.Namespace, engine: MeasuredEngine | MeasuredSglang, trainer: Trainer, where: str
) -> dict[str, Any]:
    await trainer.ask("wait", where=where)
    way = Resharded(engine, trainer, arguments.ranks)
    found = await measure(
        engine,
        arguments.model,
        way,
        updates=arguments.updates,
        quiet_s=arguments.quiet_s,
        seconds=arguments.part_s,
        first=(await trainer.ask("last"))["version"] + 1,
    )
    return found | {"memory": way.memory()}


def main() -> None:
    """Run the session."""
    parser = argparse.ArgumentParser(description="The engine's side.")
    parser.add_argument("--engine", choices=("vllm", "sglang"), required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--model", choices=SIZES, required=True)
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--trainer", type=Path, required=True)
    parser.add_argument("--waits", type=lambda text: text.split(","), default=list(WAITS))
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument("--quiet-s", type=float, default=0.6)
    parser.add_argument("--part-s", type=float, default=25.0)
    parser.add_argument("--memory-fraction", type=float, default=0.0)
    parser.add_argument("--graphs", action="store_true")
    arguments = parser.parse_args()
    faulthandler.register(signal.SIGUSR1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with tempfile.TemporaryDirectory(prefix="bench-reshard-", ignore_cleanup_errors=True) as directory:
        asyncio.run(run(arguments, Path(directory)))


if __name__ == "__main__":
    main()
