"""Contract of a run as a whole, which `tests/services/ledger/test_contract.py` runs on each ledger."""

import pytest

from protocol.errors import Reason, Refused, SettingsError
from protocol.ids import new_token
from protocol.staleness import Bound, Policy
from services.ledger.interface import Lease, Peer
from tests.contracts.ledger_rig import Driver, spec
from tests.services.ledger.verify.logs import verify_events


class RunContract:
    """The run, its settings, its processes and its log."""

    async def test_create_twice_is_refused(self, driver: Driver) -> None:
        with pytest.raises(Refused) as caught:
            await driver.ledger.status()
        assert caught.value.reason == Reason.NO_RUN
        run = driver.rig.run
        await driver.begin(B=1, steps=5)
        await driver.step(1)
        await driver.ledger.create(spec(run, steps=9, B=7))
        status = await driver.ledger.status()
        assert (status.steps, status.bound) == (9, Bound(1, 1, Policy.WAIT))
        await driver.refused(Reason.RUN_MISMATCH, driver.ledger.create(spec(run, fingerprint="g")))
        refusal = await driver.refused(Reason.RUN_MISMATCH, driver.ledger.create(spec(run, prompts=4)))
        assert refusal.detail == "created with prompts f (without end)"
        await driver.refused(Reason.WRONG_STATE, driver.ledger.create(spec(run, steps=0)))
        with pytest.raises(SettingsError, match="groups_per_step: 0 is not between"):
            await driver.ledger.create(spec(run, B=0))

    async def test_the_status_has_the_fingerprint_of_the_prompts(self, driver: Driver) -> None:
        await driver.begin(fingerprint="0123456789012345")  # not a number, though all of it are digits
        assert (await driver.ledger.status()).fingerprint == "0123456789012345"
        assert (await driver.ledger.claim("e2")).fingerprint == "0123456789012345"

    async def test_a_run_that_is_created_again_has_the_drop_limits_of_then(self, driver: Driver) -> None:
        await driver.begin()
        limits = {"max_attempts": 1, "drop_window": 2, "drop_share": 1.0}
        await driver.ledger.create(spec(driver.rig.run, **limits))
        for _ in range(2):
            lease = await driver.lease()
            await driver.ledger.release(lease.group, lease.token, "crash")
        with pytest.raises(Refused) as caught:
            await driver.lease()
        assert (caught.value.reason, caught.value.detail) == (Reason.HALTED, "attempts")
        assert (await driver.ledger.status()).dropped_by_reason == {"attempts": 2}

    async def test_bound_changes_when_rule_f_allows(self, driver: Driver) -> None:
        await driver.begin(E=1, B=2)
        assert await driver.ledger.set_bound(max_staleness=1) is None
        leases = [await driver.lease() for _ in range(3)]
        wanted = await driver.ledger.set_bound(groups_per_step=1)
        assert wanted == Bound(1, 1, Policy.WAIT)
        assert await driver.ledger.set_bound(groups_per_step=1) == wanted
        assert (await driver.ledger.status()).pending == wanted
        await driver.refused(Reason.PENDING, driver.lease())
        await driver.ledger.release(leases[0].group, leases[0].token, "x")
        status = await driver.ledger.status()
        assert (status.bound, status.pending) == (wanted, None)

    async def test_bound_change_can_be_taken_back(self, driver: Driver) -> None:
        await driver.begin(E=0, B=2)
        for _ in range(2):
            await driver.lease()
        assert await driver.ledger.set_bound(groups_per_step=1) is not None
        assert await driver.ledger.set_bound(groups_per_step=2) is None
        assert (await driver.ledger.status()).pending is None
        with pytest.raises(SettingsError):
            await driver.ledger.set_bound(max_staleness=-1)

    async def test_bound_pending_on_too_few_scored_groups_takes_a_short_batch(self, driver: Driver) -> None:
        await driver.begin(E=0, B=4)
        await driver.scored(3)
        assert await driver.ledger.set_bound(groups_per_step=1) is not None
        await driver.refused(Reason.PENDING, driver.lease())
        taken = await driver.ledger.take("e1")
        assert len(taken.groups) == 3
        await driver.commit(taken)
        assert (await driver.ledger.status()).bound.groups_per_step == 1

    async def test_drain_stops_leases_only(self, driver: Driver) -> None:
        await driver.begin(B=1)
        (lease,) = await driver.scored(1)
        await driver.ledger.drain()
        await driver.ledger.drain()
        await driver.refused(Reason.DRAINING, driver.lease())
        await driver.commit(await driver.ledger.take("e1"))
        await driver.ledger.drain(False)
        assert (await driver.lease()).group == lease.group + 1

    async def test_a_drained_run_trains_what_is_left_in_a_short_step(self, driver: Driver) -> None:
        await driver.begin(E=1, B=4)
        await driver.scored(1)
        held, gone, handed_back = [await driver.lease() for _ in range(3)]
        await driver.ledger.drain()
        await driver.refused(Reason.NOT_ENOUGH, driver.ledger.take("e1"))
        await driver.ledger.release(handed_back.group, handed_back.token, "drain")
        await driver.ledger.accept(held.group, held.token, {0: 1})
        await driver.refused(Reason.NOT_ENOUGH, driver.ledger.take("e1"))
        driver.rig.expire(gone.group)
        taken = await driver.ledger.take("e1")
        assert [group.group for group in taken.groups] == [0, held.group]
        assert await driver.commit(taken) == 1
        await driver.refused(Reason.EXHAUSTED, driver.ledger.take("e1"))
        await driver.ledger.drain(False)
        await driver.refused(Reason.NOT_ENOUGH, driver.ledger.take("e1"))
        events = list(await driver.ledger.events(0, 1000))
        assert verify_events(events).violations == []

    async def test_the_trainer_halts_a_run_for_a_cause(self, driver: Driver) -> None:
        await driver.begin(B=1)
        await driver.refused(Reason.STALE_EPOCH, driver.ledger.halt("e0", "step 3: a cause"))
        for cause in ("step 3: a cause", "step 3: a cause", "step 4: another"):
            await driver.ledger.halt("e1", cause)
        assert (await driver.ledger.status()).halted == "step 3: a cause"
        await driver.refused(Reason.HALTED, driver.lease())
        await driver.ledger.drain(False)
        assert (await driver.lease()).group == 0
        events = list(await driver.ledger.events(0, 1000))
        assert [event["reason"] for event in events if event["event"] == "halt"] == ["step 3: a cause"]
        assert verify_events(events).violations == []

    async def test_a_halted_run_goes_on_once_leases_are_granted_again(self, driver: Driver) -> None:
        await driver.begin(B=4, drop_window=2, drop_share=1.0, max_attempts=1)
        waiting, leased = await driver.lease(), await driver.lease()
        for _ in range(2):
            lease = await driver.lease()
            await driver.ledger.drop(lease.group, lease.token, "reward")
        await driver.ledger.release(waiting.group, waiting.token, "reward")
        await driver.refused(Reason.HALTED, driver.lease())
        await driver.ledger.drain()
        assert (await driver.ledger.status()).halted == "reward"
        await driver.ledger.drain(False)
        await driver.ledger.drain(False)
        status = await driver.ledger.status()
        assert (status.halted, status.draining) == ("", False)
        await driver.ledger.release(leased.group, leased.token, "reward")
        again = await driver.lease()
        assert (again.group, again.attempt) == (waiting.group, 1)
        await driver.ledger.drop(again.group, again.token, "reward")
        again = await driver.lease()  # one drop alone does not fill the window again
        assert (again.group, again.attempt) == (leased.group, 1)
        events = list(await driver.ledger.events(0, 1000))
        told = [
            (event["event"], event.get("reason"))
            for event in events
            if event["event"] in ("halt", "unhalt", "drain")
        ]
        assert told == [("halt", "reward"), ("drain", None), ("unhalt", "reward"), ("drain", None)]
        assert verify_events(events).violations == []

    async def test_engines_only_move_forward(self, driver: Driver) -> None:
        await driver.begin(B=1)
        await driver.step(1)
        await driver.ledger.applied("eng", "e1", 0)
        assert (await driver.ledger.status()).engines == {"eng": ("e1", 1)}
        await driver.refused(Reason.WRONG_STATE, driver.ledger.applied("eng", "e1", 2))
        await driver.refused(Reason.STALE_EPOCH, driver.ledger.applied("eng", "e9", 1))
        await driver.ledger.unregister("eng")
        await driver.refused(Reason.STALE_ENGINE, driver.lease())

    async def test_registry_lists_the_living(self, driver: Driver) -> None:
        info = {"pid": 1, "endpoints": {"scored": "tcp://127.0.0.1:1"}, "text": "ü"}
        a, b = Peer("rollout", "a.1", info), Peer("ingest", "b.2", {})
        for peer in (b, a):
            await driver.ledger.register(peer, 600_000)
        await driver.ledger.register(Peer("rollout", "dead", {}), 0)
        assert list(await driver.ledger.peers()) == [a, b]
        assert list(await driver.ledger.peers("rollout")) == [a]
        await driver.ledger.unregister("a.1")
        assert list(await driver.ledger.peers()) == [b]

    async def test_unregistering_ends_the_leases_of_that_process_alone(self, driver: Driver) -> None:
        ledger = driver.ledger
        await driver.begin(B=2)
        first, second = await driver.lease(), await driver.lease()
        other = await ledger.lease(request="o", engine="eng", holder="other", lease_ms=600_000)
        before = (await ledger.status()).sequence
        for _ in range(2):  # again after a lost answer
            await ledger.unregister("worker")
        events = [(event["event"], event["group"]) for event in await ledger.events(before, 1000)]
        assert events == [("expire", first.group), ("expire", second.group)]
        await ledger.extend(other.group, other.token, 600_000)
        again = await driver.lease()
        assert (again.group, again.attempt) == (first.group, 2)
        await driver.refused(Reason.NOT_HELD, ledger.accept(first.group, first.token, {0: 1}))
        await ledger.accept(second.group, second.token, {0: 1})  # nobody has taken that over
        assert verify_events(list(await ledger.events(0, 1000))).violations == []

    async def test_refuted_engine_holds_nothing_and_gets_no_lease_until_it_ends(self, driver: Driver) -> None:
        ledger = driver.ledger
        await driver.begin(B=3, engines=("eng", "wrong"))

        async def lease(engine: str) -> Lease:
            return await ledger.lease(request=new_token(), engine=engine, holder=engine, lease_ms=600_000)

        mine, expired, live = await lease("eng"), await lease("wrong"), await lease("wrong")
        await driver.reaped(expired)
        before = (await ledger.status()).sequence
        for _ in range(2):  # again after a lost answer
            await ledger.unregister("wrong", refuted=True)
        events = [(event["event"], event["group"]) for event in await ledger.events(before, 1000)]
        assert events == [("release", live.group), ("release", expired.group)]
        for held in (expired, live):  # what it has generated is not trained
            await driver.refused(Reason.NOT_HELD, ledger.extend(held.group, held.token, 600_000))
            await driver.refused(Reason.NOT_HELD, ledger.accept(held.group, held.token, {0: 1}))
        # it lives on, as it has not heard of it
        await ledger.register(Peer("rollout", "wrong", {}), 600_000)
        await driver.refused(Reason.REFUTED, ledger.applied("wrong", "e1", 0))
        await driver.refused(Reason.REFUTED, lease("wrong"))
        await ledger.accept(mine.group, mine.token, {0: 1})
        again = await lease("eng")
        assert (again.group, again.attempt) == (expired.group, 2)
        await ledger.unregister("wrong")
        await ledger.applied("wrong", "e1", 0)
        assert (await lease("wrong")).group == live.group
        assert verify_events(list(await ledger.events(0, 1000))).violations == []

    async def test_endpoints_are_those_of_the_registry(self, driver: Driver) -> None:
        ledger = driver.ledger
        assert dict(await ledger.endpoints("scored")) == {}
        await ledger.register(Peer("ingest", "a", {"endpoints": {"scored": "tcp://h:1"}}), 600_000)
        await ledger.register(Peer("rollout", "b", {"pid": 1}), 600_000)
        assert dict(await ledger.endpoints("scored")) == {"a": "tcp://h:1"}
        await ledger.register(
            Peer("reward", "c", {"endpoints": {"scored": "tcp://h:3", "rollouts": "tcp://h:2"}}), 600_000
        )
        assert dict(await ledger.endpoints("scored")) == {"a": "tcp://h:1", "c": "tcp://h:3"}
        assert dict(await ledger.endpoints("rollouts")) == {"c": "tcp://h:2"}
        await ledger.register(Peer("reward", "c", {"endpoints": {"rollouts": "tcp://h:4"}}), 0)
        await ledger.register(Peer("rollout", "b", {"pid": 1}), 600_000)
        assert dict(await ledger.endpoints("rollouts")) == {}
        await ledger.unregister("a")
        assert dict(await ledger.endpoints("scored")) == {}

    async def test_head_says_where_the_run_stands(self, driver: Driver) -> None:
        with pytest.raises(Refused) as caught:
            await driver.ledger.head()
        assert caught.value.reason == Reason.NO_RUN
        await driver.begin(B=1)
        await driver.step(1)
        status, head = await driver.ledger.status(), await driver.ledger.head()
        assert (head.epoch, head.version, head.sequence) == (status.epoch, status.version, status.sequence)

    async def test_events_are_contiguous_and_prove_the_run(self, driver: Driver) -> None:
        await driver.begin(B=1)
        for _ in range(3):
            await driver.step(1)
        events = list(await driver.ledger.events(0, 10_000))
        assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
        assert len(events) == (await driver.ledger.status()).sequence
        result = verify_events(events)
        assert (result.violations, result.issued, result.trained, result.steps) == ([], 3, 3, 3)
        assert list(await driver.ledger.events(2, 3)) == events[2:5]

    async def test_archived_events_are_forgotten_and_a_late_archive_stops_leases(
        self, driver: Driver
    ) -> None:
        await driver.begin(B=1, steps=1000)
        while (await driver.ledger.status()).sequence <= 200:
            await driver.step(1)
        await driver.refused(Reason.ARCHIVE_BEHIND, driver.lease())
        last = (await driver.ledger.status()).sequence
        await driver.refused(Reason.WRONG_STATE, driver.ledger.archived(last + 1))
        for upto in (last, 1):
            await driver.ledger.archived(upto)
        assert list(await driver.ledger.events(0, 10)) == []
        await driver.lease()
        assert [event["seq"] for event in await driver.ledger.events(last, 10)] == [last + 1]
