"""More ways to spoil an event log: forged leases, steps, rewinds and bounds. See `corruptions.py`, whose list
they join."""

from tests.services.ledger.verify.corruptions import corruption, insert, remove
from tests.services.ledger.verify.logs import Log, find

# -- forged leases


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


# -- forged drops


@corruption
def a_group_without_signal_that_nobody_scored(log: Log) -> str:
    drop = find(log, "drop")
    drop["reason"] = "no_signal"
    drop.pop("reward", None)
    return f"group {drop['group']}: dropped for no_signal when it was {drop['from']}, or without a reward"


@corruption
def a_group_without_signal_that_was_accepted(log: Log) -> str:
    drop = find(log, "drop", **{"from": "scored"})
    drop["reason"], drop["reward"] = "no_signal", 1.0
    return f"group {drop['group']}: dropped for no_signal when it was scored"


# -- forged steps, rewinds and bounds


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
    return "epoch e0 was used before"


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


# -- no events


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
