"""What `verify` asks of a `rebuild` event: the ledger holds what the log and the journal say, and nothing
that was trained is forgotten."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from protocol.lifecycle import GroupState

if TYPE_CHECKING:
    from services.ledger.verify.verifier import Verifier

_S = GroupState


def check_rebuild(run: "Verifier", event: Mapping[str, Any]) -> None:
    """Follow a rebuild: what the journal told, then everything that was only leased or running goes back."""
    for told in event.get("told", ()):
        if told["event"] == "accept":
            _accept(run, told)
        else:
            _commit(run, told)
    _issue(run, event["issued"])
    for number, group in run.groups.items():
        if group.state is _S.TAKEN:
            run.place(number, _S.SCORED)
            run.count_transition(group, "take", -1)
        elif group.state is _S.LEASED:
            run.place(number, _S.WAITING)
    for number in event.get("waiting", ()):
        if run.groups[number].state is _S.SCORED:  # over the version, or without a place in rule F
            run.place(number, _S.WAITING)
    run.running, run.epoch, run.engines = None, event["epoch"], {}
    for name in ("scored", "waiting"):
        present = sorted(number for number, group in run.groups.items() if group.state == name)
        if sorted(event.get(name, ())) != present:
            run.violation(f"groups {sorted(event.get(name, ()))} are {name}, but the log says {present}")
    stated, told_so = (event["version"], event["issued"], event["trained"], event["dropped"]), run.counters()
    if stated != told_so:
        run.violation(f"version, issued, trained, dropped are {stated} in the event and {told_so} in the log")


def _issue(run: "Verifier", issued: int) -> None:
    """Groups that the log has not named: their leases were lost."""
    for number in range(len(run.groups), issued):
        run.group(number)


def _accept(run: "Verifier", told: Mapping[str, Any]) -> None:
    _issue(run, told["group"] + 1)
    group = run.group(told["group"])
    if group.state in (_S.TRAINED, _S.DROPPED):
        return run.violation(
            f"group {told['group']} is {group.state}, and the journal says that it was accepted after that"
        )
    group.token, group.deadline, group.bound = told["token"], told["deadline"], told["bound"]
    group.counts = {int(version): n for version, n in told["counts"].items()}
    group.passed = {"accept": 1}
    run.place(told["group"], _S.SCORED)
    return None


def _commit(run: "Verifier", told: Mapping[str, Any]) -> None:
    step = told["step"]
    if step > run.version or step < run.checkpoint:
        run.violation(f"the journal says that step {step} was committed, at version {run.version}")
    if step < run.version:  # after a rewind that the log does not have
        for number, group in run.groups.items():
            if group.state is _S.TRAINED and group.step >= step:
                run.place(number, _S.WAITING)
                run.trained -= 1
            elif group.state is _S.SCORED and any(
                n and version > step for version, n in group.counts.items()
            ):
                run.place(number, _S.WAITING)
    for accepted in told["accepted"]:
        _accept(run, accepted)
        run.place(accepted["group"], _S.TAKEN)
        run.groups[accepted["group"]].passed["take"] = 1
    for name, counts in told["groups"].items():
        run.train(int(name), step, {int(version): n for version, n in counts.items()})
    run.version = step + 1
