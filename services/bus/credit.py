"""How a receiver splits its window among its senders. Pure.

Legend: a sender's window is absolute (`granted` messages in total on its connection), so that repeating or
losing a grant does no harm. Promised = granted but not sent yet + received but not finished. The receiver
keeps

    sum over senders of promised + orphans <= window + number of senders

where orphans are unfinished messages of senders that are gone. Each sender has at least one message promised;
nobody has more than `ahead` granted without using it, so that idle senders cannot hoard the window; what is
free goes to whoever has least.
"""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(slots=True)
class Account:
    """One sender's side of the window."""

    granted: int = 0
    """Messages that it may have sent in total."""
    seen: int = 0
    """Messages that have arrived."""
    unfinished: int = 0
    """Of these, neither acknowledged nor refused."""

    @property
    def unused(self) -> int:
        return max(0, self.granted - self.seen)

    @property
    def promised(self) -> int:
        return self.unused + self.unfinished


def top_up(window: int, accounts: Collection[Account], orphans: int = 0) -> list[Account]:
    """Raise grants as far as the window allows; returns the accounts that were raised."""
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
        hungry = [account for account in accounts if account.unused < ahead]
        if not hungry:
            break
        grant(min(hungry, key=lambda account: account.promised))
        free -= 1
    return list(raised.values())
