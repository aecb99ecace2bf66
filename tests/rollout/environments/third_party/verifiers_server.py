"""Serves an environment of the package `verifiers`; run with a Python that has it: `... ADDRESS_FILE`."""

import asyncio
import sys
from pathlib import Path

import verifiers.v1 as vf
from verifiers.v1.serve import EnvServer


async def main() -> None:
    config = vf.SingleAgentEnvConfig.model_validate(
        {"taskset": {"id": "verifiers_taskset"}, "agent": {"runtime": {"type": "subprocess"}}}
    )
    server = EnvServer(config, address="tcp://127.0.0.1:0")
    written = Path(sys.argv[1] + ".new")
    written.write_text(server.address)
    written.rename(sys.argv[1])
    await server.run()


asyncio.run(main())
