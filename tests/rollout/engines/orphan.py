"""Starts vLLM, prints the pids of its processes, and generates until it is killed. Run by `test_orphans.py`."""

import asyncio
import sys
from pathlib import Path

import psutil

from rollout.engines.base import EngineConfig, Request, Sampling
from rollout.engines.registry import make_engine


async def main(model_dir: Path) -> None:
    engine = make_engine(EngineConfig(), model_dir, "orphan.1")
    await engine.start()
    print(*[child.pid for child in psutil.Process().children(recursive=True)], flush=True)
    while True:
        await engine.generate(Request("orphan/0", (1, 2, 3), Sampling(max_tokens=500)))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
