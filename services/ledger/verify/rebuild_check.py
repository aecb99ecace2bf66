"""Checks a `rebuild` event: the rebuilt state must match log and journal, and keep trained groups."""

from protocol.lifecycle import GroupState
from services.ledger.event_log.events import RebuildEvent
from services.ledger.interface import JournalAccept, JournalCommit
from services.ledger.verify.replay_state import ReplayState, sampled_versions

_S = GroupState


def check_rebuild(state: ReplayState, event: RebuildEvent) -> None:
    """Replay a rebuild: apply the journal's entries, then return leased groups and the running step."""
    for journal_event in event.journal_events:
        if isinstance(journal_event, JournalAccept):
            _accept(state, journal_event)
        else:
            _commit(state, journal_event)
    state.issue(event.issued)
    for number, group in state.groups.items():
        if group.state is _S.TAKEN:
            state.set_state(number, _S.SCORED)
            group.count_transition("take", -1)
        elif group.state is _S.LEASED:
            state.set_state(number, _S.WAITING)
    for number in event.waiting:
        if state.group(number).state is _S.SCORED:  # newer than the version, or without a place in rule F
            state.set_state(number, _S.WAITING)
    state.running, state.epoch, state.engines = None, event.epoch, {}
    for name, stated in (("scored", event.scored), ("waiting", event.waiting)):
        found = sorted(number for number, _ in state.groups_in_state(GroupState(name)))
        if sorted(stated) != found:
            state.report(f"groups {sorted(stated)} are {name}, but the log says {found}")
    counters = (event.version, event.issued, event.trained, event.dropped)
    if counters != state.counters():
        state.report(
            f"version, issued, trained, dropped are {counters} in the event and {state.counters()} in the log"
        )


def _accept(state: ReplayState, accepted: JournalAccept) -> None:
    number = accepted.group
    state.issue(number + 1)
    group = state.group(number)
    if group.state in (_S.TRAINED, _S.DROPPED):
        return state.report(
            f"group {number} is {group.state}, and the journal says that it was accepted after that"
        )
    group.token, group.deadline, group.bound = accepted.token, accepted.deadline, accepted.bound
    group.counts = accepted.counts
    group.transitions = {"accept": 1}
    state.set_state(number, _S.SCORED)
    return None


def _commit(state: ReplayState, committed: JournalCommit) -> None:
    step = committed.step
    if step > state.version or step < state.checkpoint:
        state.report(f"the journal says that step {step} was committed, at version {state.version}")
    if step < state.version:  # after a rewind that the log lost
        for number, group in state.groups_in_state(_S.TRAINED, _S.SCORED):
            if group.state is _S.TRAINED and group.step >= step:
                state.set_state(number, _S.WAITING)
                state.trained -= 1
            elif group.state is _S.SCORED and any(
                version > step for version in sampled_versions(group.counts)
            ):
                state.set_state(number, _S.WAITING)
    for accepted in committed.accepted:
        _accept(state, accepted)
        state.set_state(accepted.group, _S.TAKEN)
        state.groups[accepted.group].transitions["take"] = 1
    for number, counts in committed.groups.items():
        state.train(number, step, counts)
    state.version = step + 1
