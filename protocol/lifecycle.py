"""Defines the lifecycle of a prompt group as one table.

Each event is one Lua script in `services/ledger/redis/lua/`.

    LEASED -accept-> SCORED -take-> TAKEN -commit-> TRAINED

The first lease creates a group, so no transition leads to the first LEASED. A WAITING group has no tokens and
no deadline; it is leased before new groups. A lease expires at its time limit, or when its holder is
unregistered. An expired lease stays LEASED and valid until another worker takes the group over.
"""

from enum import StrEnum


class GroupState(StrEnum):
    """State of a group. TRAINED and DROPPED are final, but `rewind` returns a TRAINED group to WAITING."""

    WAITING = "waiting"
    LEASED = "leased"
    SCORED = "scored"
    TAKEN = "taken"
    TRAINED = "trained"
    DROPPED = "dropped"


class Event(StrEnum):
    """Event that moves a group to another state; the comments name the service that causes it."""

    LEASE = "lease"  # worker: new token, new deadline
    EXTEND = "extend"  # holder: keeps the lease alive
    RELEASE = "release"  # holder: hands the group back
    ACCEPT = "accept"  # ingest, after fsync
    TAKE = "take"  # trainer of this epoch
    COMMIT = "commit"  # trainer of this epoch: version + 1
    UNTAKE = "untake"  # trainer of a new epoch
    LOST = "lost"  # ingest: the spool lacks the data of the group
    DROP = "drop"  # holder, ingest or trainer, with a reason; never on TAKEN groups
    REWIND = "rewind"  # trainer of a new epoch: generated or trained on an abandoned branch


NO_SIGNAL = "no_signal"
"""Drop reason of a group that the ingest filters out because all of its rewards are equal."""

_S, _E = GroupState, Event

TRANSITIONS: dict[GroupState, dict[Event, GroupState]] = {
    _S.WAITING: {_E.LEASE: _S.LEASED, _E.DROP: _S.DROPPED},
    _S.LEASED: {
        _E.LEASE: _S.LEASED,  # only once expired
        _E.EXTEND: _S.LEASED,
        _E.RELEASE: _S.WAITING,
        _E.ACCEPT: _S.SCORED,
        _E.DROP: _S.DROPPED,
        _E.REWIND: _S.WAITING,
    },
    _S.SCORED: {_E.TAKE: _S.TAKEN, _E.LOST: _S.WAITING, _E.DROP: _S.DROPPED, _E.REWIND: _S.WAITING},
    _S.TAKEN: {_E.COMMIT: _S.TRAINED, _E.UNTAKE: _S.SCORED, _E.REWIND: _S.WAITING},
    _S.TRAINED: {_E.REWIND: _S.WAITING},
    _S.DROPPED: {},
}

ACTIVE = frozenset({_S.WAITING, _S.LEASED, _S.SCORED, _S.TAKEN})


def after(state: GroupState, event: Event) -> GroupState | None:
    """Return the state that follows `state` after `event`, or None if the transition does not exist."""
    return TRANSITIONS[state].get(event)
