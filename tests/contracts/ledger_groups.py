"""Contract of one group's life, which `tests/services/ledger/test_contract.py` runs on each ledger."""

import pytest

from protocol.errors import Reason, Refused
from protocol.lifecycle import GroupState
from tests.contracts.ledger_clock import passed
from tests.contracts.ledger_rig import Driver


class GroupContract:
    """One group's life."""

    async def test_lease_numbers_groups_and_sets_deadlines(self, driver: Driver) -> None:
        await driver.begin(E=1, B=2)
        leases = [await driver.lease() for _ in range(4)]
        assert [lease.group for lease in leases] == [0, 1, 2, 3]
        assert {
            (lease.epoch, lease.version, lease.deadline, lease.max_staleness, lease.attempt)
            for lease in leases
        } == {("e1", 0, 1, 1, 1)}
        assert len({lease.token for lease in leases}) == 4
        await driver.refused(Reason.BOUND, driver.lease())
        status = await driver.ledger.status()
        assert status.issued == 4
        assert status.states[GroupState.LEASED] == 4

    async def test_the_log_tells_the_reward_of_a_group_that_has_one(self, driver: Driver) -> None:
        await driver.begin()
        for reward in (0.333333, 1.0, -2.5, None):
            lease = await driver.lease()
            await driver.ledger.accept(lease.group, lease.token, {0: 1}, reward)
        accepts = [event for event in await driver.ledger.events(0, 100) if event["event"] == "accept"]
        assert [event.get("reward") for event in accepts] == [0.333333, 1.0, -2.5, None]

    async def test_lease_repeated_with_the_same_request_is_the_same(self, driver: Driver) -> None:
        await driver.begin()
        lease = await driver.lease(request="again")
        assert await driver.lease(request="again") == lease
        assert (await driver.ledger.status()).issued == 1
        await driver.ledger.accept(lease.group, lease.token, {0: 1})
        assert (await driver.lease(request="again")).group == 1

    async def test_answers_to_lease_requests_are_kept_for_leased_groups_only(self, driver: Driver) -> None:
        await driver.begin(E=1, B=2)
        first, second = await driver.lease(request="a"), await driver.lease(request="b")
        await driver.ledger.release(first.group, first.token, "x")
        again = await driver.lease(request="a")
        assert (again.group, again.attempt) == (first.group, 2)
        driver.rig.expire(second.group)
        assert (await driver.lease(request="c")).group == second.group
        assert (await driver.lease(request="b")).group not in (first.group, second.group)

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

    async def test_a_worker_that_waits_with_fewer_groups_comes_first(self, driver: Driver) -> None:
        """The busy one has over 20 % more."""
        await driver.begin(E=1, B=4, engines=("busy", "idle"))
        busy = [await driver.lease("busy", groups=n) for n in range(8)]
        await driver.refused(Reason.BOUND, driver.lease("idle"))
        await driver.refused(Reason.BOUND, driver.lease("busy", groups=8))
        for lease in busy[:2]:
            await driver.ledger.drop(lease.group, lease.token, "x")
        await driver.refused(Reason.BUSIER, driver.lease("busy", groups=6))
        assert (await driver.lease("idle")).attempt == 1  # it waits no more
        assert (await driver.lease("busy", groups=6)).attempt == 1
        await driver.refused(Reason.BOUND, driver.lease("idle", groups=5))
        await driver.ledger.drop(busy[2].group, busy[2].token, "x")
        assert (await driver.lease("busy", groups=6)).attempt == 1

    async def test_a_worker_that_may_not_lease_or_asks_no_more_keeps_nobody_waiting(
        self, driver: Driver
    ) -> None:
        await driver.begin(E=1, B=2, engines=("busy", "idle", "old"))
        leases = [await driver.lease("busy", groups=n) for n in range(4)]
        for engine in ("idle", "old"):
            await driver.refused(Reason.BOUND, driver.lease(engine))
        for lease in leases[:2]:
            await driver.ledger.accept(lease.group, lease.token, {0: 1})
        await driver.commit(await driver.ledger.take("e1"))
        await driver.ledger.applied("busy", "e1", 1)
        assert (await driver.lease("busy", groups=2)).version == 1  # the others serve version 0
        await driver.ledger.applied("idle", "e1", 1)
        await driver.refused(Reason.BUSIER, driver.lease("busy", groups=2))
        await passed(driver, 6000)
        assert (await driver.lease("busy", groups=3)).version == 1

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
        await driver.refused(
            Reason.BOUND, driver.ledger.accept(expired.group, expired.token, {0: 1})
        )  # late now

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
        assert [event["event"] for event in await driver.ledger.events(0, 1000)].count("accept") == 1
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
            await driver.ledger.drop(leased.group, leased.token, "reward", 5, "reward: 1/0")
            await driver.ledger.drop(scored.group, scored.token, "filter")
        status = await driver.ledger.status()
        assert (status.dropped, status.wasted_tokens, status.dropped_by_reason) == (
            2,
            15,
            {"reward": 1, "filter": 1},
        )
        drops = [event for event in await driver.ledger.events(0, 1000) if event["event"] == "drop"]
        assert [event["detail"] for event in drops] == ["reward: 1/0", ""]
        await driver.refused(Reason.WRONG_STATE, driver.ledger.accept(leased.group, leased.token, {0: 1}))
        await driver.refused(Reason.WRONG_STATE, driver.ledger.release(leased.group, leased.token, "x"))
        await driver.refused(Reason.NOT_HELD, driver.ledger.extend(leased.group, leased.token, 1000))

    async def test_a_group_without_signal_gives_its_place_to_another(self, driver: Driver) -> None:
        await driver.begin(E=0, B=2)
        first, second = await driver.lease(), await driver.lease()
        await driver.refused(Reason.BOUND, driver.lease())
        for _ in range(2):
            await driver.ledger.filter(first.group, first.token, 30, 0.25, 0)
        status = await driver.ledger.status()
        assert (status.dropped, status.wasted_tokens) == (1, 30)
        assert status.dropped_by_reason == {"no_signal": 1}
        assert status.wasted_by_reason == {"no_signal": 30}
        await driver.ledger.accept(second.group, second.token, {0: 1})
        await driver.refused(Reason.NOT_ENOUGH, driver.ledger.take("e1"))
        third = await driver.lease()
        await driver.ledger.accept(third.group, third.token, {0: 1})
        assert [group.group for group in (await driver.ledger.take("e1")).groups] == [1, 2]
        (drop,) = [event for event in await driver.ledger.events(0, 100) if event["event"] == "drop"]
        assert {name: drop[name] for name in ("from", "reason", "reward", "wasted_tokens")} == {
            "from": "leased", "reason": "no_signal", "reward": 0.25, "wasted_tokens": 30
        }  # fmt: skip

    async def test_a_group_is_not_filtered_once_it_was_accepted(self, driver: Driver) -> None:
        await driver.begin(B=1)
        (lease,) = await driver.scored(1)
        other = await driver.lease()
        await driver.ledger.filter(lease.group, lease.token, 10, 1.0, 0)
        taken = await driver.ledger.take("e1")
        await driver.ledger.filter(lease.group, lease.token, 10, 1.0, 0)
        await driver.commit(taken)
        assert (await driver.ledger.status()).dropped == 0
        await driver.ledger.checkpointed(1)
        await driver.refused(Reason.DUPLICATE, driver.ledger.filter(lease.group, lease.token, 10, 1.0, 0))
        await driver.refused(Reason.UNKNOWN_GROUP, driver.ledger.filter(99, lease.token, 10, 1.0, 0))
        await driver.refused(Reason.NOT_HELD, driver.ledger.filter(other.group, "other", 10, 1.0, 0))

    async def test_an_expired_lease_is_filtered_without_room(self, driver: Driver) -> None:
        await driver.begin(E=0, B=1)
        lease = await driver.lease()
        await driver.reaped(lease)
        await driver.ledger.filter(lease.group, lease.token, 10, 1.0, 0)
        assert (await driver.lease()).group == 1

    async def test_groups_without_signal_have_a_limit_of_their_own(self, driver: Driver) -> None:
        await driver.begin(E=1, B=2, drop_window=2, drop_share=0.5)

        async def filtered() -> None:
            lease = await driver.lease()
            await driver.ledger.filter(lease.group, lease.token, 1, 0.0, 2)

        for _ in range(3):
            await filtered()
        await driver.step(2)  # counts anew
        for _ in range(4):
            assert (await driver.ledger.status()).halted == ""
            await filtered()
        refusal = await driver.refused(Reason.HALTED, driver.lease())
        assert refusal.detail == "no_signal"
        await driver.ledger.drain(False)
        for _ in range(4):
            await filtered()
        assert (await driver.ledger.status()).halted == "no_signal"

    async def test_prompts_that_run_out_by_filtering_end_the_run(self, driver: Driver) -> None:
        await driver.begin(B=2, prompts=3)
        for _ in range(2):
            lease = await driver.lease()
            await driver.ledger.filter(lease.group, lease.token, 1, 0.0, 0)
        await driver.scored(1)
        await driver.refused(Reason.EXHAUSTED, driver.lease())
        assert len((await driver.ledger.take("e1")).groups) == 1  # the last step may be short

    async def test_taken_groups_are_out_of_reach(self, driver: Driver) -> None:
        await driver.begin(B=1)
        (lease,) = await driver.scored(1)
        await driver.ledger.take("e1")
        await driver.refused(Reason.WRONG_STATE, driver.ledger.drop(lease.group, lease.token, "filter"))
        await driver.refused(Reason.WRONG_STATE, driver.ledger.lost(lease.group, lease.token))
        await driver.refused(Reason.WRONG_STATE, driver.ledger.release(lease.group, lease.token, "x"))
        await driver.refused(Reason.NOT_HELD, driver.ledger.extend(lease.group, lease.token, 1000))
        assert (await driver.ledger.status()).states[GroupState.TAKEN] == 1

    async def test_attempts_of_a_group_end(self, driver: Driver) -> None:
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
