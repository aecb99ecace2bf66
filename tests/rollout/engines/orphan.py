"""Starts an engine, prints the pids of its processes, and generates until it is killed.

`test_orphans.py` runs it. It holds the lock of its device; the lock's file is beside the model directory.
"""

import asyncio
import sys
from pathlib import Path

import psutil

from rollout.engines.base import EngineConfig, Request, Sampling
from rollout.engines.registry import make_engine
from services.gpu_sharing.device_lock import DeviceLock
from tests.contracts.sglang_environment import sglang_settings


async def main(name: str, model_dir: Path) -> None:
    device = DeviceLock(model_dir.parent)
    assert device.try_acquire(exclusive=False)
    device.allow_children()
    own = sglang_settings() if name == "sglang" else {}
    engine = make_engine(EngineConfig(name=name, **own), model_dir, "orphan.1")
    await engine.start()
    print(*[child.pid for child in psutil.Process().children(recursive=True)], flush=True)
    while True:
        await engine.generate(Request("orphan/0", (1, 2, 3), Sampling(max_tokens=500)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
