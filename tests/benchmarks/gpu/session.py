"""The engine's side: starts the engine once and measures one part after the other on it.

    python -m tests.benchmarks.gpu.session --model 7b --parts nccl,vllm-nccl,per-tensor

Says what happens by lines of JSON on stdout: {"event": "ready" | "begin" | "end" | "fail", ...}. A part of
the project's own that fails is not the end if the engine is still well. "PART@same" is the part with the
trainer on the engine's GPU.
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
from pathlib import Path
from typing import Any

from rollout.engines.base import EngineConfig
from tests.benchmarks.gpu.engine import MeasuredEngine, engine_config, start_engine
from tests.benchmarks.gpu.measure import measure
from tests.benchmarks.gpu.partner import SAME, Partner
from tests.benchmarks.gpu.shapes import SIZES, write_model
from tests.benchmarks.gpu.updates import make_way
from trainer.weights.registry import TRANSPORTS

TRAINER_START_S = 120.0
VERSIONS_APART = 1000


class Session:
    """One engine, and the trainer that the part at hand needs."""

    def __init__(self, arguments: argparse.Namespace, directory: Path) -> None:
        self._arguments = arguments
        self._model_dir = directory / "model"
        self._partner: Partner | None = None
        self._place = ""
        self._first = 0

    async def run(self) -> None:
        """Start, measure all parts, end."""
        arguments = self._arguments
        await asyncio.to_thread(write_model, arguments.model, self._model_dir, arguments.layers)
        began = time.monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                starting = group.create_task(start_engine(self._config(), self._model_dir), name="engine")
                is_apart = self._devices(arguments.parts[0]) != arguments.same_devices
                if is_apart or not SIZES[arguments.model].held:  # else it would disturb vLLM's look at memory
                    group.create_task(self._trainer(arguments.parts[0]), name="trainer")
            partner = await self._trainer(arguments.parts[0])
        except Exception as error:
            say("fail", part="engine", error=reason(error))
            raise
        engine = starting.result()
        say(
            "ready",
            start_s=time.monotonic() - began,
            bytes=partner.bytes,
            tensors=len(partner.shapes),
            staging=arguments.staging,
            memory=await engine.worker("memory"),
        )
        try:
            for part in arguments.parts:
                say("begin", part=part)
                try:
                    say("end", part=part, result=await self._part(part, engine))
                except Exception as error:
                    traceback.print_exception(error)
                    say("fail", part=part, error=reason(error))
                    if part.removesuffix(SAME) not in TRANSPORTS:
                        raise  # nobody knows what its half of an update has left behind
                    await self._drop_trainer()
                    await engine.check()
        finally:
            await self._drop_trainer()
            await engine.close()

    async def _part(self, part: str, engine: MeasuredEngine) -> dict[str, Any]:
        arguments = self._arguments
        partner = await self._trainer(part)
        way = make_way(part.removesuffix(SAME), engine, partner, arguments.bucket_mb)
        self._first += VERSIONS_APART
        found = await measure(
            engine,
            arguments.model,
            way,
            updates=arguments.updates,
            quiet_s=arguments.quiet_s,
            seconds=arguments.part_s,
            first=self._first,
        )
        found["memory"] = {
            "engine": await engine.worker("memory"),
            "trainer": (await partner.ask("memory"))["peak"],
        }
        await partner.ask("close")
        return found

    def _config(self) -> EngineConfig:
        arguments = self._arguments
        return engine_config(
            arguments.model, arguments.memory_fraction, arguments.kv, arguments.eager, arguments.staging
        )

    async def _trainer(self, part: str) -> Partner:
        """The trainer where this part wants it; one that runs there already stays."""
        place = self._devices(part)
        if self._partner is None or self._place != place:
            await self._drop_trainer()
            self._partner, self._place = (
                await Partner.start(self._arguments.model, self._model_dir, place, TRAINER_START_S),
                place,
            )
        return self._partner

    def _devices(self, part: str) -> str:
        return str(self._arguments.same_devices if part.endswith(SAME) else self._arguments.trainer_devices)

    async def _drop_trainer(self) -> None:
        partner, self._partner = self._partner, None
        if partner is not None:
            await partner.close()


def say(event: str, **more: Any) -> None:
    """One line for the process above."""
    print(json.dumps({"event": event, **more}), flush=True)


def reason(error: BaseException) -> str:
    """What failed, in a line; of a group the first that is not a consequence."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"[:500]


def main() -> None:
    """Run the session."""
    parser = argparse.ArgumentParser(description="The engine's side of the GPU benchmark.")
    parser.add_argument("--model", choices=SIZES, required=True)
    parser.add_argument("--parts", type=lambda text: text.split(","), required=True)
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--quiet-s", type=float, default=1.0)
    parser.add_argument("--part-s", type=float, default=40.0)
    parser.add_argument("--bucket-mb", type=int, default=0)
    parser.add_argument("--memory-fraction", type=float, default=0.25)
    parser.add_argument("--kv", choices=("keep", "recompute"), default="keep")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--staging", default="device")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--trainer-devices", default="0")
    parser.add_argument("--same-devices", default="1")
    arguments = parser.parse_args()
    faulthandler.register(signal.SIGUSR1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with tempfile.TemporaryDirectory(prefix="tether-bench-gpu-", ignore_cleanup_errors=True) as directory:
        asyncio.run(Session(arguments, Path(directory)).run())


if __name__ == "__main__":
    main()
