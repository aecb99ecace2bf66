"""The life of a prompt group, as one table. Each row is one Lua script in `services/ledger/redis/lua/`.

    LEASED -accept-> SCORED -take-> TAKEN -commit-> TRAINED

A group is created by its first lease; there is no row before that. WAITING groups hold no tokens and no
deadline, and are leased before new ones. An expired lease stays LEASED and valid until another worker takes
the group over.
"""

from enum import StrEnum


class GroupState(StrEnum):
    """Where a group is. TRAINED and DROPPED are final (a rewind is a new epoch and un-trains by `rewind`)."""

    WAITING = "waiting"
    LEASED = "leased"
    SCORED = "scored"
    TAKEN = "taken"
    TRAINED = "trained"
    DROPPED = "dropped"


class Event(StrEnum):
    """What moves a group on."""

    LEASE = "lease"  # worker: new token, new deadline
    EXTEND = "extend"  # holder: keeps the lease alive
    RELEASE = "release"  # holder: hands the group back
    ACCEPT = "accept"  # ingest, after fsync
    TAKE = "take"  # trainer of this epoch
    COMMIT = "commit"  # trainer of this epoch: version + 1
    UNTAKE = "untake"  # trainer of a new epoch
    LOST = "lost"  # ingest: the spool does not have the data
    DROP = "drop"  # holder or trainer, with a reason; never on TAKEN groups
    REWIND = "rewind"  # trainer of a new epoch: generated or trained on an abandoned branch


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
    """The state that `event` leads to from `state`, or None if the table has no such row."""
    return TRANSITIONS[state].get(event)
