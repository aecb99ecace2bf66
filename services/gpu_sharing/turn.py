"""Trainer and engines that share a GPU use it by turns: who is to have it, how the other is asked to leave,
and how both know.

The registry says whose turn it is, and a message on the bus only that it is worth a look; neither keeps
anybody out. That does the lock of the device (`device.py`), which whoever is on it holds: the trainer begins
when all engines have left it, an engine takes it in the engines' turn when the trainer has. So both can never
have it, whatever is late, lost or away.

Where no trainer is registered, it has died, or the ledger was away: engines that sleep sleep on until its
successor has made its first turn, those that generate go on.
"""

import asyncio
import logging
from contextlib import suppress
from enum import StrEnum

from protocol.errors import TetherError
from protocol.topics import Role
from services.gpu_sharing.device_lock import DeviceLock
from services.runtime.process import Process

log = logging.getLogger("tether.turns")

TURN, HOLDS = "turn", "holds_device"
"""What trainer and engine write into the registry; HOLDS is for people, and for names in errors."""
LOOK_S = 1.0
"""How often an engine looks without being told to, and the trainer who it waits for."""
POLL_S = 0.01


class Turn(StrEnum):
    """Who uses the device."""

    TRAINER = "trainer"
    ENGINES = "engines"


async def holders(process: Process, device: DeviceLock) -> str:
    """Who holds the device, for people: what the registry says of it, and what else this host shows."""
    seen = await asyncio.to_thread(device.holders)
    known: dict[str, int] = {}
    with suppress(TetherError, TimeoutError):  # the ledger may be away
        async with asyncio.timeout(LOOK_S):
            peers = [*await process.ledger.peers(Role.ROLLOUT), *await process.ledger.peers(Role.TRAINER)]
        pids = {
            peer.incarnation: int(peer.info.get("pid", 0))
            for peer in peers
            if peer.incarnation != process.incarnation
        }
        known = {name: pids[name] for name in pids if pids[name] in seen}
        known |= {peer.incarnation: pids[peer.incarnation] for peer in peers if peer.info.get(HOLDS)}
    others = [f"{name} (pid {pid})" for pid, name in seen.items() if pid not in known.values()]
    return ", ".join([*known, *others]) or "a process that cannot be seen from here"
