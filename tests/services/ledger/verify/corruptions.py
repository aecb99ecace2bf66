"""Ways to spoil an event log. Each changes a log in place, closes up its numbers, and returns words that
`verify` has to say."""

import copy
from collections.abc import Callable

from tests.services.ledger.verify.logs import Event, Log, find, renumbered

Corruption = Callable[[Log], str]
CORRUPTIONS: list[Corruption] = []


def corruption(spoil: Corruption) -> Corruption:
    CORRUPTIONS.append(spoil)
    return spoil


def insert(log: Log, after: Event, event: Event) -> None:
    log.insert(log.index(after) + 1, event)
    renumbered(log)


def remove(log: Log, *events: Event) -> None:
    log[:] = [event for event in log if not any(event is other for other in events)]
    renumbered(log)


def double(log: Log, event: Event) -> None:
    insert(log, event, copy.deepcopy(event))


def trained_group(log: Log) -> tuple[Event, int, Event]:
    """The last commit, one of its groups, and that group's accept."""
    commit = find(log, "commit")
    group = int(next(iter(commit["groups"])))
    return commit, group, find(log, "accept", group=group)


# -- trained twice, trained wrongly


@corruption
def a_doubled_commit(log: Log) -> str:
    commit = find(log, "commit")
    double(log, commit)
    return f"version {commit['version']} from step {commit['step']} does not follow"


@corruption
def a_group_committed_in_two_steps(log: Log) -> str:
    first, second = find(log, "commit", -2), find(log, "commit", -1)
    group = next(iter(first["groups"]))
    second["groups"][group] = first["groups"][group]
    return f"group {group}: commit from trained"


@corruption
def a_lag_over_the_bound(log: Log) -> str:
    commit, group, accept = trained_group(log)
    bound = find(log, "lease", group=group)["bound"]
    accept["counts"] = commit["groups"][str(group)] = {str(commit["step"] - bound - 1): 1}
    return f"group {group}: a token of lag {bound + 1} was trained, over the bound {bound}"


@corruption
def more_trained_than_accepted(log: Log) -> str:
    commit, group, _ = trained_group(log)
    counts = commit["groups"][str(group)]
    counts[next(iter(counts))] += 1
    return f"group {group}: more tokens"


@corruption
def fewer_accepted_than_trained(log: Log) -> str:
    _, group, accept = trained_group(log)
    accept["counts"] = {version: n - 1 for version, n in accept["counts"].items()}
    return f"group {group}: more tokens"


@corruption
def tokens_of_a_version_to_come(log: Log) -> str:
    commit, group, accept = trained_group(log)
    accept["counts"] = commit["groups"][str(group)] = {str(commit["version"]): 1}
    return f"group {group}: tokens of version {commit['version']}, which is not committed"


@corruption
def tokens_older_than_the_engine(log: Log) -> str:
    _, group, accept = trained_group(log)
    served = find(log, "lease", group=group)["version"]
    accept["counts"][str(served - 1)] = 1
    return f"group {group}: tokens of version {served - 1}, but its engine served {served}"


@corruption
def another_group_committed(log: Log) -> str:
    commit, group, _ = trained_group(log)
    commit["groups"]["0"] = commit["groups"].pop(str(group))
    return f"{find(log, 'take')['groups']} were taken"


@corruption
def a_skipped_version(log: Log) -> str:
    commit = find(log, "commit", 3)
    commit["version"] += 1
    return f"version {commit['version']} from step {commit['step']} does not follow"


@corruption
def a_commit_of_a_fenced_trainer(log: Log) -> str:
    find(log, "commit")["epoch"] = "e0"
    return "epoch e0 acts"


# -- counted wrongly


def miscounted(name: str) -> Corruption:
    def spoil(log: Log) -> str:
        commit = find(log, "commit")
        commit[name] += 1
        return f"seq {commit['seq']} (commit): issued, trained, dropped, active are"

    spoil.__name__ = f"an_edited_count_of_{name}_groups"
    return spoil


for counter in ("issued", "trained", "dropped", "active"):
    corruption(miscounted(counter))


# -- vanished


@corruption
def a_vanished_group(log: Log) -> str:
    remove(log, *[event for event in log if event.get("group") == 7])
    return "group 7"


@corruption
def a_vanished_last_group(log: Log) -> str:
    """Its own events, and its name in the take and the commit."""
    commit, group, _ = trained_group(log)
    del commit["groups"][str(group)]
    find(log, "take")["groups"].remove(group)
    remove(log, *[event for event in log if event.get("group") == group])
    return f"seq {commit['seq']} (commit): issued, trained, dropped, active are"


@corruption
def a_vanished_lease(log: Log) -> str:
    lease = find(log, "lease", 5)
    remove(log, lease)
    return f"group {lease['group']}"


@corruption
def a_vanished_accept(log: Log) -> str:
    accept = find(log, "accept", 5)
    remove(log, accept)
    return f"group {accept['group']}: take from leased"


@corruption
def a_vanished_take(log: Log) -> str:
    remove(log, find(log, "take"))
    return f"seq {find(log, 'commit')['seq']} (commit)"


@corruption
def a_vanished_commit(log: Log) -> str:
    gone = find(log, "commit", 4)
    remove(log, gone)
    return f"version {gone['version']}, which is not committed"


@corruption
def a_vanished_drop(log: Log) -> str:
    drop = find(log, "drop", 0)
    remove(log, drop)
    return "issued, trained, dropped, active are"


@corruption
def a_vanished_expiry(log: Log) -> str:
    lease = find(log, "lease", attempt=2)
    remove(
        log,
        *[
            event
            for event in log
            if event["event"] in ("expire", "release", "lost") and event["group"] == lease["group"]
        ],
    )
    return f"group {lease['group']}: "


@corruption
def a_vanished_head(log: Log) -> str:
    del log[:1]
    renumbered(log)
    return "the log begins with claim"


@corruption
def a_gap(log: Log) -> str:
    del log[len(log) // 2]
    return "a gap"


# -- in the wrong order, or twice


@corruption
def a_doubled_accept(log: Log) -> str:
    accept = find(log, "accept")
    double(log, accept)
    return f"group {accept['group']}: accept from scored"


@corruption
def a_dropped_group_that_comes_back(log: Log) -> str:
    drop = find(log, "drop", 0)
    lease = copy.deepcopy(find(log, "lease", group=drop["group"]))
    insert(log, drop, lease)
    return f"group {drop['group']}: lease from dropped"


@corruption
def a_commit_before_its_take(log: Log) -> str:
    take, commit = log.index(find(log, "take")), log.index(find(log, "commit"))
    log[take], log[commit] = log[commit], log[take]
    renumbered(log)
    return f"seq {take + 1} (commit)"
