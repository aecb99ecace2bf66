"""Ways to spoil an event log. Each changes a log in place, closes up its numbers, and returns words that `verify` has to say."""

import copy
from collections.abc import Callable

from tests.services.ledger.logs import Event, Log, find, renumbered

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


# -- trained twice, trained wrongly --------------------------------------------------------------------------------------
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


# -- counted wrongly -----------------------------------------------------------------------------------------------------
def miscounted(name: str) -> Corruption:
    def spoil(log: Log) -> str:
        commit = find(log, "commit")
        commit[name] += 1
        return f"seq {commit['seq']} (commit): issued, trained, dropped, active are"

    spoil.__name__ = f"an_edited_count_of_{name}_groups"
    return spoil


for counter in ("issued", "trained", "dropped", "active"):
    corruption(miscounted(counter))


# -- vanished ------------------------------------------------------------------------------------------------------------
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
    remove(log, *[event for event in log if event["event"] in ("expire", "release", "lost") and event["group"] == lease["group"]])
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


# -- in the wrong order, or twice ----------------------------------------------------------------------------------------
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


# -- forged leases -------------------------------------------------------------------------------------------------------
@corruption
def a_forged_token(log: Log) -> str:
    accept = find(log, "accept")
    accept["token"] = "forged"
    return f"group {accept['group']}: token forged is not the current one"


@corruption
def a_forged_deadline(log: Log) -> str:
    lease = find(log, "lease")
    lease["deadline"] += 1
    return f"group {lease['group']}: deadline {lease['deadline']} is not"


@corruption
def a_forged_bound(log: Log) -> str:
    lease = find(log, "lease")
    lease["bound"] += 1
    lease["deadline"] += 1
    return f"group {lease['group']}: leased under"


@corruption
def a_forged_attempt(log: Log) -> str:
    lease = find(log, "lease")
    lease["attempt"] += 1
    return f"group {lease['group']}: attempt {lease['attempt']}"


@corruption
def a_lease_out_of_turn(log: Log) -> str:
    lease = find(log, "lease", attempt=2)
    lease["group"], lease["attempt"] = lease["group"] + 1, 1
    return f"leased before group {lease['group'] - 1}, which waits"


@corruption
def a_lease_beyond_the_prompts(log: Log) -> str:
    find(log, "create")["prompts"] -= 1
    return "group 59: leased, but there are 59 prompts"


@corruption
def a_lease_of_an_engine_that_serves_something_else(log: Log) -> str:
    lease = find(log, "lease", version=3)
    applied = find(log, "applied", version=3, engine=lease["engine"])
    applied["version"] -= 1
    return f"group {lease['group']}: engine {lease['engine']} did not acknowledge version 3"


# -- forged steps, rewinds and bounds ------------------------------------------------------------------------------------
@corruption
def a_crowd(log: Log) -> str:
    """Leases under a smaller B than the one in force."""
    for event in log:
        if event["event"] in ("create", "lease"):
            event["groups_per_step"] = 1
    return "rule F does not hold"


@corruption
def a_batch_out_of_turn(log: Log) -> str:
    take = find(log, "take", 2)
    scored = find(log[log.index(take) :], "take", 1)["groups"]
    swapped = {take["groups"][0]: scored[0], scored[0]: take["groups"][0]}
    for event in (take, find(log, "take", 3)):
        event["groups"] = [swapped.get(group, group) for group in event["groups"]]
    return f"groups {take['groups']} are taken, but the first"


@corruption
def a_short_batch(log: Log) -> str:
    take = find(log, "take", 5)
    take["groups"].pop()
    return f"only {len(take['groups'])} groups are taken"


@corruption
def a_rewind_that_forgets_a_group(log: Log) -> str:
    resume = find(log, "resume", continued=False)
    group = resume["waiting"].pop()
    return f"{resume['waiting'] + [group]} should be"


@corruption
def a_rewind_that_was_none(log: Log) -> str:
    resume = find(log, "resume", continued=False)
    resume["continued"] = True
    return f"seq {resume['seq']} (resume): continue"


@corruption
def an_epoch_that_comes_back(log: Log) -> str:
    claim = find(log, "claim")
    claim["epoch"] = "e0"
    return "epoch e0 comes back"


@corruption
def an_abandoned_branch_that_goes_on(log: Log) -> str:
    resume = find(log, "resume", continued=False)
    applied = next(event for event in log[log.index(resume) :] if event["event"] == "applied")
    applied["epoch"] = "e0"
    return f"engine {applied['engine']} serves epoch e0, which is not of the branch"


@corruption
def a_bound_in_force_too_early(log: Log) -> str:
    bound, pending = find(log, "bound"), find(log, "bound_pending")
    bound = next(event for event in log[log.index(pending) :] if event["event"] == "bound")
    remove(log, bound)
    insert(log, pending, bound)
    return f"seq {bound['seq']} (bound): Bound("


@corruption
def a_checkpoint_of_what_is_not_committed(log: Log) -> str:
    checkpoint = find(log, "checkpoint")
    checkpoint["version"] += 5
    return f"version {checkpoint['version']} is durable"


# -- no events -----------------------------------------------------------------------------------------------------------
@corruption
def nonsense_in_a_field(log: Log) -> str:
    take = find(log, "take", 1)
    take["groups"] = 7
    return f"seq {take['seq']} (take): malformed"


@corruption
def an_unknown_event(log: Log) -> str:
    publish = find(log, "publish")
    publish["event"] = "bless"
    return f"seq {publish['seq']} (bless): unknown event"
