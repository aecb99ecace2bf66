"""Unregisters processes that have exited without doing it themselves, so that no process waits for them.

The leases of a process that was killed would otherwise last for `rollout.lease_s`, and its registration for
`ledger.ttl_s`. Where a process cannot be proven dead, or the ledger is away, that time still ends them.
"""

import asyncio
import logging

import psutil  # type: ignore[import-untyped]

from protocol.errors import TetherError
from services.ledger.interface import Ledger, Peer
from services.runtime.process import pid_space

log = logging.getLogger("tether.up")

LIMIT_S = 60.0
"""Limit of unregistering all that have exited, seconds."""


async def unregister_loop(ledger: Ledger, exited: asyncio.Event) -> None:
    """Unregister dead processes at once, and again each time `exited` is set, until cancelled."""
    while True:
        exited.clear()
        try:
            async with asyncio.timeout(LIMIT_S):
                await unregister_dead(ledger)
        except (TetherError, TimeoutError) as error:
            log.warning("service.not_unregistered error=%r", error)
        await exited.wait()


async def unregister_dead(ledger: Ledger) -> None:
    """Unregister every process of this host that has exited; their leases expire."""
    for peer in await ledger.peers():
        if _is_dead(peer):
            await ledger.unregister(peer.incarnation)
            log.info("service.unregistered incarnation=%s", peer.incarnation)


def _is_dead(peer: Peer) -> bool:
    """Return whether a registered process has exited for certain.

    The registration was read before: a process that has the same id by now is taken for it, and not dead. An
    id of another host or container is never compared.
    """
    pid, space = peer.info.get("pid"), peer.info.get("pid_space")
    is_here = bool(space) and space == pid_space()
    return is_here and isinstance(pid, int) and 0 < pid < 1 << 31 and not _is_running(pid)


def _is_running(pid: int) -> bool:
    """Return whether there is a process `pid` which is not a zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
