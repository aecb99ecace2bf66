"""Publishes how full a rollout worker's engine is."""

import asyncio

from protocol.errors import EngineError
from rollout.engines.base import Engine, Occupancy
from services.runtime.process import Process


async def occupancy_loop(process: Process, engine: Engine) -> None:
    """Bring the engine's occupancy into the registry's info once per heartbeat, until cancelled."""
    interval_s = process.settings.ledger.ttl_s / 3
    while True:
        found = await read_occupancy(engine, interval_s)
        use = None if found.kv_use is None else round(found.kv_use, 4)
        process.info.update(running=found.running, kv_use=use)
        await asyncio.sleep(interval_s)


async def read_occupancy(engine: Engine, limit_s: float) -> Occupancy:
    """Return the engine's occupancy, or that it is not known if the engine does not say within `limit_s`.

    An engine that died is none of this function's business: whoever generates with it notices.
    """
    try:
        async with asyncio.timeout(limit_s):
            return await engine.occupancy()
    except (TimeoutError, EngineError):
        return Occupancy()
