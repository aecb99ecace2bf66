"""What every ledger does; run by `tests/services/ledger/test_contract.py` on each implementation."""

import pytest

from protocol.errors import Reason, Refused, SettingsError
from protocol.lifecycle import GroupState
from protocol.staleness import Bound, Policy
from services.ledger.interface import Peer
from services.ledger.verify import verify_events
from tests.contracts.ledger_rig import Driver, spec


class GroupContract:
    """One group's life."""

    async def test_lease_numbers_groups_and_sets_deadlines(self, driver: Driver) -> None:
        await driver.begin(E=1, B=2)
        leases = [await driver.lease() for _ in range(4)]
        assert [lease.group for lease in leases] == [0, 1, 2, 3]
        assert {(lease.epoch, lease.version, lease.deadline, lease.max_staleness, lease.attempt) for lease in leases} == {
            ("e1", 0, 1, 1, 1)
        }
        assert len({lease.token for lease in leases}) == 4
        await driver.refused(Reason.BOUND, driver.lease())
        status = await driver.ledger.status()
        assert status.issued == 4
        assert status.states[GroupState.LEASED] == 4

    async def test_lease_repeated_with_the_same_request_is_the_same(self, driver: Driver) -> None:
        await driver.begin()
        lease = await driver.lease(request="again")
        assert await driver.lease(request="again") == lease
        assert (await driver.ledger.status()).issued == 1

    async def test_lease_needs_a_run_and_an_engine_of_this_branch(self, driver: Driver) -> None:
        with pytest.raises(Refused) as caught:
            await driver.lease()
        assert caught.value.reason == Reason.NO_RUN
        await driver.begin()
        await driver.refused(Reason.STALE_ENGINE, driver.lease("stranger"))

    async def test_a_slow_engine_is_refused_where_it_would_be_late(self, driver: Driver) -> None:
        await driver.begin(E=0, B=1, engines=("eng", "slow"))
        await driver.step(1)
        await driver.refused(Reason.BOUND, driver.lease("slow"))
        assert (await driver.lease("eng")).version == 1

    async def test_expired_lease_is_taken_over_and_the_old_holder_loses(self, driver: Driver) -> None:
        await driver.begin()
        first = await driver.lease()
        driver.rig.expire(first.group)
        second = await driver.lease("eng")
        assert (second.group, second.attempt) == (first.group, 2)
        assert second.token != first.token
        await driver.refused(Reason.NOT_HELD, driver.ledger.extend(first.group, first.token, 1000))
        await driver.refused(Reason.NOT_HELD, driver.ledger.accept(first.group, first.token, {0: 1}))
        await driver.ledger.accept(second.group, second.token, {0: 1})

    async def test_expired_lease_stays_valid_while_there_is_room(self, driver: Driver) -> None:
        await driver.begin()
        extended, accepted = await driver.lease(), await driver.lease()
        driver.rig.expire(extended.group)
        driver.rig.expire(accepted.group)
        await driver.ledger.extend(extended.group, extended.token, 600_000)
        await driver.ledger.accept(accepted.group, accepted.token, {0: 1})
        status = await driver.ledger.status()
        assert (status.states[GroupState.LEASED], status.states[GroupState.SCORED]) == (1, 1)

    async def test_expired_lease_without_room_is_refused(self, driver: Driver) -> None:
        await driver.begin(E=0, B=2)
        expired, released = await driver.lease(), await driver.lease()
        await driver.ledger.release(released.group, released.token, "x")
        await driver.reaped(expired)
        lease = await driver.lease()
        assert lease.group == released.group  # WAITING ones come before expired ones
        assert await driver.ledger.set_bound(groups_per_step=1) is None
        await driver.refused(Reason.BOUND, driver.ledger.extend(expired.group, expired.token, 1000))
        await driver.ledger.accept(lease.group, lease.token, {0: 1})
        await driver.commit(await driver.ledger.take("e1"))
        await driver.refused(Reason.BOUND, driver.ledger.accept(expired.group, expired.token, {0: 1}))  # late now

    async def test_release_hands_back_and_keeps_attempts(self, driver: Driver) -> None:
        await driver.begin()
        lease = await driver.lease()
        await driver.ledger.release(lease.group, lease.token, "drain")
        await driver.ledger.release(lease.group, lease.token, "drain")
        assert (await driver.ledger.status()).states[GroupState.WAITING] == 1
        again = await driver.lease()
        assert (again.group, again.attempt) == (lease.group, 2)

    async def test_waiting_groups_are_leased_lowest_first(self, driver: Driver) -> None:
        await driver.begin()
        leases = [await driver.lease() for _ in range(3)]
        for lease in reversed(leases):
            await driver.ledger.release(lease.group, lease.token, "drain")
        assert [(await driver.lease()).group for _ in range(4)] == [0, 1, 2, 3]

    async def test_accept_repeated_succeeds_at_every_later_state(self, driver: Driver) -> None:
        await driver.begin(B=1)
        (lease,) = await driver.scored(1)
        for _ in range(2):
            await driver.ledger.accept(lease.group, lease.token, {0: 10})
        taken = await driver.ledger.take("e1")
        await driver.ledger.accept(lease.group, lease.token, {0: 10})
        await driver.commit(taken)
        await driver.ledger.accept(lease.group, lease.token, {0: 10})
        await driver.ledger.checkpointed(1)
        await driver.refused(Reason.DUPLICATE, driver.ledger.accept(lease.group, lease.token, {0: 10}))
        await driver.refused(Reason.UNKNOWN_GROUP, driver.ledger.accept(99, lease.token, {0: 10}))
        await driver.refused(Reason.NOT_HELD, driver.ledger.extend(lease.group, lease.token, 1000))

    async def test_lost_data_is_generated_again(self, driver: Driver) -> None:
        await driver.begin()
        (lease,) = await driver.scored(1)
        await driver.refused(Reason.NOT_HELD, driver.ledger.lost(lease.group, "other"))
        await driver.ledger.lost(lease.group, lease.token)
        await driver.ledger.lost(lease.group, lease.token)
        await driver.refused(Reason.NOT_HELD, driver.ledger.accept(lease.group, lease.token, {0: 1}))
        assert (await driver.lease()).group == lease.group

    async def test_drop_counts_and_fences(self, driver: Driver) -> None:
        await driver.begin()
        leased, (scored,) = await driver.lease(), await driver.scored(1)
        await driver.refused(Reason.NOT_HELD, driver.ledger.drop(leased.group, "other", "filter"))
        for _ in range(2):
            await driver.ledger.drop(leased.group, leased.token, "reward", 5)
            await driver.ledger.drop(scored.group, scored.token, "filter")
        status = await driver.ledger.status()
        assert (status.dropped, status.wasted_tokens, status.dropped_by_reason) == (2, 15, {"reward": 1, "filter": 1})
        await driver.refused(Reason.WRONG_STATE, driver.ledger.accept(leased.group, leased.token, {0: 1}))
        await driver.refused(Reason.WRONG_STATE, driver.ledger.release(leased.group, leased.token, "x"))
        await driver.refused(Reason.NOT_HELD, driver.ledger.extend(leased.group, leased.token, 1000))

    async def test_taken_groups_are_out_of_reach(self, driver: Driver) -> None:
        await driver.begin(B=1)
        (lease,) = await driver.scored(1)
        await driver.ledger.take("e1")
        await driver.refused(Reason.WRONG_STATE, driver.ledger.drop(lease.group, lease.token, "filter"))
        await driver.refused(Reason.WRONG_STATE, driver.ledger.lost(lease.group, lease.token))
        await driver.refused(Reason.WRONG_STATE, driver.ledger.release(lease.group, lease.token, "x"))
        await driver.refused(Reason.NOT_HELD, driver.ledger.extend(lease.group, lease.token, 1000))

    async def test_attempts_end(self, driver: Driver) -> None:
        await driver.begin(max_attempts=2)
        for _ in range(2):
            lease = await driver.lease()
            assert lease.group == 0
            await driver.ledger.release(lease.group, lease.token, "crash")
        assert (await driver.lease()).group == 1
        assert (await driver.ledger.status()).dropped_by_reason == {"attempts": 1}
        events = await driver.ledger.events(0, 1000)
        assert [event["detail"] for event in events if event["event"] == "drop"] == ["crash"]

    async def test_one_reason_that_drops_too_much_halts(self, driver: Driver) -> None:
        await driver.begin(drop_window=3, drop_share=0.6)
        for reason in ("filter", "broken", "broken"):
            lease = await driver.lease()
            await driver.ledger.drop(lease.group, lease.token, reason)
        refusal = await driver.refused(Reason.HALTED, driver.lease())
        assert refusal.detail == "broken"
        assert (await driver.ledger.status()).halted == "broken"


class StepContract:
    """The trainer's side."""

    async def test_take_and_commit_make_a_version(self, driver: Driver) -> None:
        await driver.begin(E=1, B=2)
        await driver.refused(Reason.NOT_ENOUGH, driver.ledger.take("e1"))
        leases = await driver.scored(3)
        taken = await driver.ledger.take("e1")
        assert await driver.ledger.take("e1") == taken
        assert (taken.step, [group.group for group in taken.groups], taken.dropped) == (0, [0, 1], ())
        assert [group.token for group in taken.groups] == [lease.token for lease in leases[:2]]
        assert taken.groups[0].counts == {0: 10}
        for _ in range(2):
            assert await driver.commit(taken, digest=2**64 - 1) == 1
        (record,) = await driver.ledger.step_records(0)
        assert (record.step, record.epoch, record.digest, record.groups) == (0, "e1", 2**64 - 1, taken.groups)
        assert list(await driver.ledger.reports(0)) == [b"report0"]
        assert await driver.ledger.manifest() == b"m0"
        await driver.ledger.checkpointed(1)
        assert list(await driver.ledger.step_records(0)) == []
        assert list(await driver.ledger.reports(0)) == [b"report0"]

    async def test_commit_refuses_what_was_not_taken(self, driver: Driver) -> None:
        await driver.begin(E=0, B=2)
        await driver.refused(Reason.STALE_STEP, driver.ledger.commit("e1", 0, {}, digest=1, report=b"", manifest=b""))
        await driver.scored(2)
        taken = await driver.ledger.take("e1")
        await driver.refused(Reason.WRONG_STATE, driver.commit(taken, counts={0: {0: 10}}))
        await driver.refused(Reason.WRONG_STATE, driver.commit(taken, counts={0: {0: 10}, 7: {0: 10}}))
        await driver.refused(Reason.WRONG_STATE, driver.commit(taken, counts={0: {0: 10}, 1: {0: 11}}))
        await driver.refused(Reason.STALE_EPOCH, driver.commit(taken, epoch="e0"))
        await driver.refused(Reason.STALE_STEP, driver.ledger.commit("e1", 1, {0: {}, 1: {}}, digest=1, report=b"", manifest=b""))
        assert await driver.commit(taken, counts={0: {}, 1: {0: 3}}) == 1

    async def test_commit_refuses_tokens_over_the_bound(self, driver: Driver) -> None:
        await driver.begin(E=0, B=1, policy=Policy.MASK, engines=("eng", "slow"))
        await driver.step(1)
        late = await driver.lease("slow")
        await driver.ledger.accept(late.group, late.token, {0: 4, 1: 6})
        taken = await driver.ledger.take("e1")
        await driver.refused(Reason.BOUND, driver.commit(taken, counts={late.group: {0: 4, 1: 6}}))
        assert await driver.commit(taken, counts={late.group: {1: 6}}) == 2

    async def test_take_under_each_policy_with_a_straggler(self, driver: Driver) -> None:
        await driver.begin(E=1, B=1, policy=Policy.WAIT)
        straggler = await driver.lease()  # deadline 1
        await driver.step(1)  # version 1: the straggler must go into the next step
        (fresh,) = await driver.scored(1)  # deadline 2
        refusal = await driver.refused(Reason.STRAGGLER, driver.ledger.take("e1"))
        assert refusal.detail == str(straggler.group)
        assert await driver.ledger.set_bound(policy=Policy.DROP) is None
        taken = await driver.ledger.take("e1")
        assert ([group.group for group in taken.groups], taken.dropped) == ([fresh.group], (straggler.group,))
        assert (await driver.ledger.status()).dropped_by_reason == {"straggler": 1}

    async def test_mask_takes_anyway_and_drops_what_has_no_fresh_token(self, driver: Driver) -> None:
        await driver.begin(E=0, B=1, policy=Policy.MASK, engines=("eng", "slow"))
        await driver.step(1)
        stale = await driver.lease("slow")
        await driver.ledger.accept(stale.group, stale.token, {0: 9})
        with pytest.raises(Refused) as caught:
            await driver.ledger.take("e1")
        assert caught.value.reason == Reason.NOT_ENOUGH
        assert (await driver.ledger.status()).dropped_by_reason == {"stale": 1}
        await driver.scored(1)
        assert (await driver.ledger.take("e1")).dropped == (stale.group,)

    async def test_short_batch_only_when_nothing_more_can_come(self, driver: Driver) -> None:
        await driver.begin(E=1, B=2, prompts=3)
        await driver.step(2)
        last = await driver.lease()
        await driver.refused(Reason.EXHAUSTED, driver.lease())
        await driver.refused(Reason.NOT_ENOUGH, driver.ledger.take("e1"))
        await driver.ledger.accept(last.group, last.token, {1: 1})
        taken = await driver.ledger.take("e1")
        assert [group.group for group in taken.groups] == [last.group]
        await driver.commit(taken)
        await driver.refused(Reason.EXHAUSTED, driver.ledger.take("e1"))

    async def test_the_end_is_leased_exactly(self, driver: Driver) -> None:
        await driver.begin(E=3, B=2, steps=2)
        await driver.scored(4)
        await driver.refused(Reason.DONE, driver.lease())
        await driver.commit(await driver.ledger.take("e1"))
        await driver.refused(Reason.DONE, driver.lease())
        await driver.commit(await driver.ledger.take("e1"))
        await driver.refused(Reason.DONE, driver.ledger.take("e1"))
        status = await driver.ledger.status()
        assert (status.done, status.issued, status.trained) == (True, 4, 4)

    async def test_a_new_epoch_fences_the_old_one(self, driver: Driver) -> None:
        await driver.begin(B=1)
        await driver.scored(1)
        taken = await driver.ledger.take("e1")
        status = await driver.ledger.claim("e2")
        assert (status.epoch, status.states[GroupState.SCORED]) == ("e2", 1)
        assert await driver.ledger.claim("e2") == status
        await driver.refused(Reason.STALE_EPOCH, driver.commit(taken))
        await driver.refused(Reason.STALE_EPOCH, driver.ledger.take("e1"))
        await driver.refused(Reason.STALE_EPOCH, driver.ledger.publish("e1", b"", 0))
        await driver.refused(Reason.STALE_EPOCH, driver.ledger.claim("e1"))
        await driver.refused(Reason.WRONG_STATE, driver.ledger.take("e2"))
        assert await driver.ledger.resume("e2", 0, 7)
        assert await driver.commit(await driver.ledger.take("e2"), "e2") == 1

    async def test_resume_continues_the_branch_of_equal_bits(self, driver: Driver) -> None:
        await driver.begin(B=1)
        await driver.step(1)
        await driver.scored(1)
        await driver.ledger.claim("e2")
        for _ in range(2):
            assert await driver.ledger.resume("e2", 1, 100)
        await driver.lease()  # the engine still serves e1, which is of the branch
        await driver.refused(Reason.WRONG_STATE, driver.ledger.resume("e2", 0, 7))
        assert (await driver.ledger.status()).trained == 1

    async def test_resume_rewinds_what_is_abandoned(self, driver: Driver) -> None:
        await driver.begin(E=2, B=1)
        await driver.step(1)
        kept = await driver.lease()
        await driver.ledger.accept(kept.group, kept.token, {1: 3})
        await driver.step(1)  # takes the kept one? earliest deadline first: yes, and leaves the newer one
        await driver.scored(1)
        leased = await driver.lease()
        await driver.ledger.claim("e2")
        await driver.refused(Reason.WRONG_STATE, driver.ledger.resume("e2", 9, 1))
        assert not await driver.ledger.resume("e2", 1, 100)
        assert not await driver.ledger.resume("e2", 1, 100)
        status = await driver.ledger.status()
        assert (status.version, status.trained, status.issued) == (1, 1, status.trained + status.active + status.dropped)
        assert status.states[GroupState.LEASED] == 0
        assert await driver.ledger.manifest() is None
        await driver.refused(Reason.STALE_ENGINE, driver.lease())
        await driver.refused(Reason.STALE_EPOCH, driver.ledger.applied("eng", "e1", 1))
        await driver.refused(Reason.NOT_HELD, driver.ledger.accept(leased.group, leased.token, {2: 1}))
        await driver.ledger.applied("eng", "e2", 1)
        again = await driver.lease()
        assert (again.group, again.attempt) == (kept.group, 1)

    async def test_resume_cannot_go_behind_a_checkpoint(self, driver: Driver) -> None:
        await driver.begin(B=1)
        await driver.step(1)
        await driver.refused(Reason.WRONG_STATE, driver.ledger.checkpointed(2))
        await driver.ledger.checkpointed(1)
        await driver.ledger.claim("e2")
        await driver.refused(Reason.WRONG_STATE, driver.ledger.resume("e2", 0, 7))

    async def test_publish_sets_the_manifest_of_the_present_version(self, driver: Driver) -> None:
        await driver.begin()
        assert await driver.ledger.manifest() is None
        await driver.ledger.publish("e1", b"\x00\xff", 0)
        await driver.ledger.publish("e1", b"\x00\xff", 0)
        assert await driver.ledger.manifest() == b"\x00\xff"
        await driver.refused(Reason.WRONG_STATE, driver.ledger.publish("e1", b"", 1))


class RunContract:
    """The run, its settings, its processes and its log."""

    async def test_create_twice(self, driver: Driver) -> None:
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
        await driver.refused(Reason.RUN_MISMATCH, driver.ledger.create(spec(run, prompts=4)))
        await driver.refused(Reason.WRONG_STATE, driver.ledger.create(spec(run, steps=0)))
        with pytest.raises(SettingsError, match="groups_per_step is 0"):
            await driver.ledger.create(spec(run, B=0))

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

    async def test_archived_events_are_forgotten_and_a_late_archive_stops_leases(self, driver: Driver) -> None:
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
