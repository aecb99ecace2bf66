"""Defines how the trainer and the engines time-slice one GPU: turns, and holders of the device.

The registry names the current turn; a message on the bus announces that the turn may have changed. Only the
device lock (`device_lock.py`) provides exclusion: every process that uses the GPU holds it. The trainer
starts when all engines have released the lock. An engine acquires it during the engines' turn, when the
trainer has released it. So both sides never hold the GPU at once, even if messages are late or lost or a
process is down.

While no trainer is registered (it died, or the ledger was unreachable), sleeping engines continue to sleep
until the next trainer has ended its first turn, and generating engines continue to generate.

The two sides are `services/trainer/gpu_turn.py` and `services/rollout/gpu_turn.py`.
"""

import asyncio
from contextlib import suppress
from enum import StrEnum

from protocol.errors import TetherError
from protocol.topics import Role
from services.gpu_sharing.device_lock import DeviceLock
from services.runtime.process import Process

TURN = "turn"
"""Key of the trainer's registry entry: a `Turn`."""
HOLDS = "holds_device"
"""Key of an engine's registry entry: whether it holds the device. Used only for names in messages."""
REGISTRY_TIMEOUT_S = 1.0


class Turn(StrEnum):
    """Side that may use the device."""

    TRAINER = "trainer"
    ENGINES = "engines"


async def holders(process: Process, device: DeviceLock) -> str:
    """Return the names of the processes that hold the device, for messages.

    Registered processes on this host are named by incarnation, others by pid and command. Processes on other
    hosts are named if their registry entry says that they hold the device.
    """
    processes = await asyncio.to_thread(device.holders)
    peer_pids: dict[str, int] = {}
    with suppress(TetherError, TimeoutError):  # the ledger may be unreachable
        async with asyncio.timeout(REGISTRY_TIMEOUT_S):
            peers = [*await process.ledger.peers(Role.ROLLOUT), *await process.ledger.peers(Role.TRAINER)]
        pids = {
            peer.incarnation: int(peer.info.get("pid", 0))
            for peer in peers
            if peer.incarnation != process.incarnation
        }
        peer_pids = {name: pids[name] for name in pids if pids[name] in processes}
        peer_pids |= {peer.incarnation: pids[peer.incarnation] for peer in peers if peer.info.get(HOLDS)}
    others = [f"{name} (pid {pid})" for pid, name in processes.items() if pid not in peer_pids.values()]
    return ", ".join([*peer_pids, *others]) or "a process that cannot be seen from here"
