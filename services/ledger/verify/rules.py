"""What `verify` asks beyond the lifecycle: which group may be leased, which tokens accepted, which groups
taken, what a rewind undoes, and that rule F holds wherever a group gets a place and wherever the bound or the
next step changes.

`Rules` looks at each event twice: `before` and `after` the verifier has moved the groups.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from protocol.lifecycle import GroupState
from protocol.staleness import Bound, Policy, holds, lag, trainable_counts

if TYPE_CHECKING:
    from services.ledger.verify.verifier import Verifier

_S = GroupState
Fields = Mapping[str, Any]


class Rules:
    """The part of the run's state that only these checks need."""

    def __init__(self, run: "Verifier") -> None:
        self.run = run
        self.steps: int | None = None
        self.prompts = -1
        self.epochs: set[str] = set()
        self.lineage: set[str] = set()
        self.resumed = ""
        self.digests: dict[int, str] = {}
        """Version -> digest of its weights, of those that no checkpoint covers."""
        self.stopped: set[str] = set()
        """Why no lease may be granted: `pending`, `draining`, `halted`."""
        self.waiting: set[int] = set()
        self.expired: set[int] = set()
        self.attempts: dict[int, int] = {}
        """Leases of groups that are not finished; a group that a rebuild brought back is not here until its
        next lease."""
        self.served: dict[int, int] = {}
        """Group -> version that its holder's engine had acknowledged."""
        self._revived = False

    def before(self, kind: object, event: Fields) -> None:
        """Look at an event that is about to be replayed."""
        if self.run.seq == 1 and kind not in ("create", "rebuild"):
            self.run.violation(f"the log begins with {kind}: what comes before it is missing")
        self._revived = event.get("group") in self.expired
        check: Callable[[Fields], None] | None = getattr(self, f"before_{kind}", None)
        if check is not None:
            check(event)

    def after(self, kind: object, event: Fields) -> None:
        """Look at an event that was replayed."""
        self._sort(kind, event)
        check: Callable[[Fields], None] | None = getattr(self, f"after_{kind}", None)
        if check is not None:
            check(event)

    def _sort(self, kind: object, event: Fields) -> None:
        """Know which groups are waiting and which leases have run out."""
        touched = [event["group"]] if "group" in event else event.get("waiting", ())
        for number in self.run.groups if kind == "rebuild" else touched:
            group = self.run.groups.get(number)
            state = group.state if group else None
            (self.waiting.add if state is _S.WAITING else self.waiting.discard)(number)
            (self.expired.add if group and state is _S.LEASED and group.expired else self.expired.discard)(
                number
            )
            if state is _S.DROPPED:
                self._forget(number)

    def _forget(self, number: int) -> None:
        self.attempts.pop(number, None)
        self.served.pop(number, None)

    def _rule_f(self, what: str) -> None:
        run = self.run
        step = run.version + (run.running is not None)
        if not holds(run.holding.values(), step, run.bound):
            run.violation(f"{what}: rule F does not hold at step {step}")

    # -- leases
    # ------------------------------------------------------------------------------------------------------
    def before_lease(self, event: Fields) -> None:
        run, number = self.run, event["group"]
        for why in sorted(self.stopped):
            run.violation(f"group {number}: leased while leases are stopped ({why})")
        first = min(self.waiting, default=None) if self.waiting else min(self.expired, default=None)
        if first is not None and number != first:
            run.violation(f"group {number}: leased before group {first}, which waits")
        if number >= self.prompts >= 0:
            run.violation(f"group {number}: leased, but there are {self.prompts} prompts")
        if event["epoch"] not in self.lineage:
            run.violation(
                f"group {number}: engine {event['engine']} serves epoch {event['epoch']}, which is not of the branch"
            )
        known = run.groups.get(number)
        if known is not None and known.token == event["token"]:
            run.violation(f"group {number}: token {event['token']} comes twice")
        if known is None or number in self.attempts:
            wanted = self.attempts.get(number, 0) + 1
            if event["attempt"] != wanted:
                run.violation(f"group {number}: attempt {event['attempt']}, but it is number {wanted}")
        self.attempts[number], self.served[number] = event["attempt"], event["version"]

    def after_lease(self, event: Fields) -> None:
        run, number = self.run, event["group"]
        self._rule_f(f"group {number}")
        step = run.version + (run.running is not None)
        if self.steps is not None and len(run.holding) > (self.steps - step) * run.bound.groups_per_step:
            run.violation(f"group {number}: leased beyond the {self.steps} steps of the run")

    def before_extend(self, event: Fields) -> None:
        if event["group"] not in self.expired:
            self.run.violation(f"group {event['group']}: extended, but its lease had not run out")

    def after_extend(self, event: Fields) -> None:
        self._rule_f(f"group {event['group']}")

    def after_accept(self, event: Fields) -> None:
        run, number = self.run, event["group"]
        counts = {int(version): n for version, n in event["counts"].items()}
        if any(n < 0 for n in counts.values()):
            run.violation(f"group {number}: counts {counts} are not numbers of tokens")
        sampled = [version for version, n in counts.items() if n]
        if max(sampled, default=run.version) > run.version:
            run.violation(f"group {number}: tokens of version {max(sampled)}, which is not committed")
        if number in self.served and min(sampled, default=run.version) < self.served[number]:
            run.violation(
                f"group {number}: tokens of version {min(sampled)}, but its engine served {self.served[number]}"
            )
        if self._revived:
            self._rule_f(f"group {number}")

    def before_drop(self, event: Fields) -> None:
        run, number, reason = self.run, event["group"], event["reason"]
        group = run.groups[number]
        if event["from"] != group.state:
            run.violation(f"group {number}: dropped from {event['from']}, but it is {group.state}")
        if event["wasted_tokens"] < sum(group.counts.values()):
            run.violation(
                f"group {number}: {event['wasted_tokens']} tokens wasted, but {sum(group.counts.values())} were accepted"
            )
        if group.state is _S.WAITING and reason != "attempts":
            run.violation(f"group {number}: dropped for {reason} while it waits")
        if reason == "stale" and trainable_counts(run.version, group.counts, group.bound):
            run.violation(f"group {number}: dropped as stale, but it has tokens within the bound")
        wanted = {"stale": Policy.MASK, "straggler": Policy.DROP}.get(reason, run.bound.policy)
        if run.bound.policy is not wanted:
            run.violation(f"group {number}: dropped as {reason} under {run.bound.policy}")

    # -- the trainer
    # -------------------------------------------------------------------------------------------------
    def before_claim(self, event: Fields) -> None:
        if event["epoch"] in self.epochs:
            self.run.violation(f"epoch {event['epoch']} comes back")
        self.epochs.add(event["epoch"])

    def before_resume(self, event: Fields) -> None:
        run, version, digest = self.run, event["version"], event["digest"]
        if self.resumed == event["epoch"]:
            run.violation(f"epoch {event['epoch']} resumes twice")
        self.resumed = event["epoch"]
        known = (
            self.digests.get(version, digest)
            if version == run.version or version > run.checkpoint
            else digest
        )
        same = known == digest
        if version == run.version and event["continued"] != (version == 0 or same):
            run.violation(
                f"continued is {event['continued']} at version {version} with digest {digest}, which was {known}"
            )
        if event["continued"]:
            self.lineage.add(event["epoch"])
        else:
            self.lineage = {event["epoch"]}
            self._check_rewind(event, version if same else version - 1)
        self.digests = {v: known for v, known in self.digests.items() if v < version} | {version: digest}

    def _check_rewind(self, event: Fields, newest: int) -> None:
        """A rewind undoes what was leased, or trained or generated on the branch that is left, and nothing
        else."""
        undone = [
            number
            for number, group in self.run.groups.items()
            if group.state is _S.LEASED
            or (group.state is _S.TRAINED and group.step >= event["version"])
            or (
                group.state is _S.SCORED
                and max((v for v, n in group.counts.items() if n), default=newest) > newest
            )
        ]
        if list(event.get("waiting", ())) != sorted(undone):
            self.run.violation(
                f"groups {event.get('waiting', [])} are undone by the rewind, but {sorted(undone)} should be"
            )

    def after_resume(self, event: Fields) -> None:
        for number in event.get("waiting", ()):
            self.attempts[number] = 0

    def before_take(self, event: Fields) -> None:
        run, batch, B = self.run, list(event["groups"]), self.run.bound.groups_per_step
        if self.resumed != event["epoch"]:
            run.violation(f"epoch {event['epoch']} takes before it resumed")
        if self.steps is not None and event["step"] >= self.steps:
            run.violation(f"step {event['step']} is taken, but the run has {self.steps}")
        scored = sorted(
            (due, number) for number, due in run.holding.items() if run.groups[number].state is _S.SCORED
        )
        if batch != [number for _, number in scored[:B]]:
            run.violation(
                f"groups {batch} are taken, but the first {B} by deadline are {[number for _, number in scored[:B]]}"
            )
        if len(batch) < B and not self._may_be_short():
            run.violation(f"only {len(batch)} groups are taken of {B}, and more can come")
        for number in batch:
            group = run.groups[number]
            fresh = trainable_counts(event["step"], group.counts, group.bound)
            if run.bound.policy is Policy.MASK and not fresh:
                run.violation(
                    f"group {number}: taken in step {event['step']} without a token within the bound"
                )
            if run.bound.policy is not Policy.MASK and group.deadline < event["step"]:
                run.violation(
                    f"group {number}: taken in step {event['step']}, after its deadline {group.deadline}"
                )

    def _may_be_short(self) -> bool:
        """No more groups can come: leases are stopped and none is out, or the prompts have run out and
        nothing is left to do."""
        run = self.run
        live = any(run.groups[number].state is _S.LEASED for number in run.holding)
        ended = 0 <= self.prompts <= len(run.groups) and not (live or self.expired or self.waiting)
        return ended or (bool(self.stopped - {"halted"}) and not live)

    def after_take(self, event: Fields) -> None:
        if self.run.bound.policy is not Policy.MASK:
            self._rule_f(f"after the take of step {event['step']}")

    def after_commit(self, event: Fields) -> None:
        run, step = self.run, event["step"]
        self.digests[step + 1] = event["digest"]
        for name, counts in event["groups"].items():
            self._forget(int(name))
            run.groups[int(name)].counts = {}  # never looked at again, and logs are long
            for version, n in counts.items():
                if n < 0 or (n and lag(step, int(version)) < 0):
                    run.violation(f"group {name}: {n} tokens of version {version} trained in step {step}")

    def before_publish(self, event: Fields) -> None:
        self.run.check_epoch(event)
        if event["version"] != self.run.version:
            self.run.violation(
                f"version {event['version']} is published, but {self.run.version} is committed"
            )

    def before_checkpoint(self, event: Fields) -> None:
        run, version = self.run, event["version"]
        if not run.checkpoint < version <= run.version:
            run.violation(
                f"version {version} is durable, which is not in {run.checkpoint + 1}..{run.version}"
            )
        self.digests = {v: digest for v, digest in self.digests.items() if v >= version}

    def after_rebuild(self, event: Fields) -> None:
        """Much of what the ledger held is not in the event: what is not known is not asked."""
        for told in event.get("told", ()):
            if told["event"] == "commit":
                self.digests = {v: known for v, known in self.digests.items() if v <= told["step"]} | {
                    told["step"] + 1: told["digest"]
                }
        self.steps, self.lineage, self.resumed = None, set(), ""
        self.stopped.discard("pending")
        self.attempts, self.served = {}, {}
        self.epochs.add(event["epoch"])

    # -- settings
    # ----------------------------------------------------------------------------------------------------
    def before_create(self, event: Fields) -> None:
        self.steps, self.prompts = event["steps"], event["prompts"]
        self._sound(event)

    def before_steps(self, event: Fields) -> None:
        self.steps = event["steps"]
        if event["steps"] < self.run.version:
            self.run.violation(f"steps are {event['steps']}, at version {self.run.version}")

    def before_bound_pending(self, event: Fields) -> None:
        self._sound(event)
        self.stopped.add("pending")

    def before_bound(self, event: Fields) -> None:
        run, new = self.run, self._sound(event)
        self.stopped.discard("pending")
        if new == run.bound:
            return
        step = run.version + (run.running is not None)
        taken = [run.groups[number].deadline for number in run.running or ()]
        untaken = [*run.holding.values(), *taken]
        if (
            not holds(run.holding.values(), step, new)
            or len(taken) > new.groups_per_step
            or (taken and not holds(untaken, run.version, new))
        ):
            run.violation(f"{new} is in force at step {step}, but rule F does not hold with it")

    def _sound(self, event: Fields) -> Bound:
        bound = Bound(event["max_staleness"], event["groups_per_step"], Policy(event["policy"]))
        if bound.max_staleness < 0 or bound.groups_per_step < 1:
            self.run.violation(f"{bound} is no bound")
        return bound

    def before_drain(self, event: Fields) -> None:
        (self.stopped.add if event["on"] else self.stopped.discard)("draining")

    def before_halt(self, event: Fields) -> None:
        self.stopped.add("halted")

    def before_unhalt(self, event: Fields) -> None:
        self.stopped.discard("halted")
        for number in self.attempts:
            if self.run.groups[number].state in (_S.WAITING, _S.LEASED):
                self.attempts[number] = 0

    def before_applied(self, event: Fields) -> None:
        if event["epoch"] not in self.lineage:
            self.run.violation(
                f"engine {event['engine']} serves epoch {event['epoch']}, which is not of the branch"
            )
