"""The ledger on Redis does what the oracle in memory does, whatever is called in whatever order."""

import hypothesis.strategies as st
from hypothesis.stateful import initialize, invariant, rule

from protocol.lifecycle import GroupState
from protocol.staleness import Policy, holds
from tests.contracts.ledger_rig import spec
from tests.services.ledger.moves import ENGINES, Moves, Pick
from tests.services.ledger.verify.logs import verify_events

PROGRESS = ["lease"] * 4 + ["accept"] * 4 + ["apply"] * 2 + ["take"] + ["commit"] * 2
DISTURB = [
    "expire",
    "expire",
    "jump",
    "extend",
    "release",
    "accept_old",
    "lost",
    "drop",
    "no_signal",
    "no_signal",
    "applied",
    "checkpointed",
    "set_bound",
    "set_bound",
    "drain",
    "create_again",
    "publish",
    "process",
    "archived",
]


class Machine(Moves):
    """Plays the moves in any order; each call must give the same result or refusal, status and events."""

    @initialize(
        E=st.integers(0, 2),
        B=st.integers(1, 3),
        policy=st.sampled_from(Policy),
        prompts=st.sampled_from([None, None, 12]),
        steps=st.sampled_from([3, 50, 50]),
        attempts=st.integers(1, 4),
        window=st.sampled_from([4, 64, 64]),
    )
    def create(
        self, E: int, B: int, policy: Policy, prompts: int | None, steps: int, attempts: int, window: int
    ) -> None:
        values = {"prompts": prompts, "max_attempts": attempts, "drop_window": window}
        self.spec = spec("x", E=E, B=B, policy=policy, steps=steps, **values)
        self.both(lambda ledger: ledger.create(self.spec))
        self.both(lambda ledger: ledger.claim("e0"))
        self.both(lambda ledger: ledger.resume("e0", 0, 0))
        for engine in ENGINES[:2]:
            self.both(lambda ledger, engine=engine: ledger.applied(engine, self.epochs[-1], 0))

    # -- rules

    def play(self, move: str, pick: Pick) -> None:
        getattr(self, move)(pick)
        if pick(range(0, 6)) == 5:
            self.lose_answer()
        self.equal()

    @rule(moves=st.lists(st.sampled_from(PROGRESS * 2 + DISTURB), min_size=5, max_size=25), data=st.data())
    def muddle(self, moves: list[str], data: st.DataObject) -> None:
        for move in moves:
            self.play(move, picker(data))

    @rule(data=st.data())
    def whole_step(self, data: st.DataObject) -> None:
        """What a run does when nothing goes wrong."""
        for engine in ENGINES[:2]:
            self.both(lambda ledger, engine=engine: ledger.applied(engine, self.epochs[-1], self.version))
        for move in (
            ["lease"] * (self.memory.ledger.run_state.bound.groups_per_step + 1)
            + ["accept"] * 4
            + ["take", "commit"]
        ):
            self.play(move, picker(data))

    @rule(data=st.data())
    def new_trainer(self, data: st.DataObject) -> None:
        self.play("restart", picker(data))

    @rule(data=st.data())
    def lost_writes(self, data: st.DataObject) -> None:
        self.play("rebuild", picker(data))
        self.play("restart", picker(data))

    def equal(self) -> None:
        """Both ledgers show the same status and have written the same events."""
        status = self.both(lambda ledger: ledger.status())
        assert status.issued == status.trained + status.dropped + status.active
        logs = [self.runner.run(rig.ledger.events(self.newest, 10_000)) for rig in (self.memory, self.redis)]
        plain = [
            [{key: value for key, value in event.items() if key != "time_ms"} for event in log]
            for log in logs
        ]
        assert plain[0] == plain[1]
        self.events += plain[0]

    @invariant()
    def all_equal(self) -> None:
        if self.calls:
            self.equal()
            self.both(lambda ledger: ledger.step_records(0))
            self.both(lambda ledger: ledger.reports(0))
            self.both(lambda ledger: ledger.manifest())

    @invariant()
    def rule_f_holds(self) -> None:
        if self.calls == 0:
            return
        run_state = self.memory.ledger.run_state
        if run_state.bound.policy is not Policy.MASK:
            assert holds(run_state.slot_deadlines(), run_state.next_step(), run_state.bound)
            if run_state.running is not None:
                taken = [group.deadline for group in run_state.of(GroupState.TAKEN)]
                assert holds([*run_state.slot_deadlines(), *taken], run_state.version, run_state.bound)

    def teardown(self) -> None:
        try:
            violations = verify_events(self.events).violations
            assert violations == [], violations
        finally:
            self.runner.run(self.redis.close())
            self.runner.close()


def picker(data: st.DataObject) -> Pick:
    return lambda choices: data.draw(st.sampled_from(choices))
