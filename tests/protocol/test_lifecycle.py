"""The lifecycle table: which states lead where."""

from protocol.lifecycle import ACTIVE, TRANSITIONS, Event, GroupState, after


def test_every_state_has_a_row() -> None:
    assert set(TRANSITIONS) == set(GroupState)


def test_taken_groups_are_never_dropped_and_dropped_ones_never_return() -> None:
    assert after(GroupState.TAKEN, Event.DROP) is None
    assert TRANSITIONS[GroupState.DROPPED] == {}


def test_only_a_rewind_leaves_trained() -> None:
    assert set(TRANSITIONS[GroupState.TRAINED]) == {Event.REWIND}


def test_the_happy_path() -> None:
    state = GroupState.LEASED
    for event in (Event.ACCEPT, Event.TAKE, Event.COMMIT):
        assert state in ACTIVE
        state = after(state, event) or state
    assert state is GroupState.TRAINED


def test_every_active_group_can_still_be_trained() -> None:
    reachable = {GroupState.TRAINED}
    while more := {state for state, row in TRANSITIONS.items() if set(row.values()) & reachable} - reachable:
        reachable |= more
    assert reachable >= ACTIVE
