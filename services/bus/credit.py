"""Splits a receiver's window of unfinished messages among its senders. Pure.

A sender's credit is absolute: `granted` messages in total on its connection, so that repeating or losing a
grant does no harm. Messages promised to a sender are granted but not sent yet, or received but not finished.
The receiver keeps

    sum over senders of promised + orphans <= window + number of senders

where orphans are unfinished messages of senders that have disconnected. Each sender has at least one message
promised. None has more than `ahead` messages granted and unused, so that idle senders cannot hoard the
window; free messages go to the sender with the fewest promised.
"""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(slots=True)
class Account:
    """Messages granted to one sender, and what it has made of them."""

    granted: int = 0
    """Messages that it may have sent on its connection in total."""
    seen: int = 0
    """Messages of these that have arrived."""
    unfinished: int = 0
    """Messages that have arrived and are neither acknowledged nor refused."""

    @property
    def unused(self) -> int:
        return max(0, self.granted - self.seen)

    @property
    def promised(self) -> int:
        return self.unused + self.unfinished


def top_up(window: int, accounts: Collection[Account], orphans: int = 0) -> list[Account]:
    """Raise grants as far as the window allows; return the accounts that were raised.

    Args:
        window: messages that the receiver works on at a time.
        accounts: its connected senders.
        orphans: unfinished messages of senders that have disconnected.
    """
    if not accounts:
        return []
    raised: dict[int, Account] = {}

    def grant(account: Account) -> None:
        account.granted = max(account.granted, account.seen) + 1
        raised[id(account)] = account

    for account in accounts:
        if account.promised < 1:
            grant(account)
    ahead = max(1, window // (2 * len(accounts)))
    free = window - orphans - sum(account.promised for account in accounts)
    while free > 0:
        eligible = [account for account in accounts if account.unused < ahead]
        if not eligible:
            break
        grant(min(eligible, key=lambda account: account.promised))
        free -= 1
    return list(raised.values())
