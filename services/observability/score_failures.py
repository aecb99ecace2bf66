"""Reports to whoever watches a run which responses could not be scored, and why."""

import asyncio
import re
from collections.abc import Callable

from protocol.errors import TetherError
from protocol.topics import Role
from services.ledger.interface import Ledger

FAILED = "failed"
"""Entry of a reward worker in the registry: its last failure, such as "function: /x/my_reward.py:12: ..."."""
POLL_S = 1.0
MOST = 20
"""Different failures that are reported."""
NUMBER = re.compile(r"\d+")


async def report_failures_loop(ledger: Ledger, report: Callable[[str], None]) -> None:
    """Report each kind of failure once, until cancelled; the numbers in a text do not make a kind."""
    reported: set[str] = set()
    while True:
        try:
            peers = await ledger.peers(Role.REWARD)
        except TetherError:
            peers = []  # whoever watches the ledger says so
        for peer in peers:
            text = str(peer.info.get(FAILED, ""))
            kind = NUMBER.sub("N", text)
            if text and kind not in reported and len(reported) < MOST:
                reported.add(kind)
                report(
                    f"{peer.info.get('name', peer.role)} could not score a group: {text} (it is tried again, "
                    "and dropped after bound.max_attempts)"
                )
        await asyncio.sleep(POLL_S)
