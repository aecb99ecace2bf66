"""Contract of the trainer's side, which `tests/services/ledger/test_contract.py` runs on each ledger."""

import pytest

from protocol.errors import Reason, Refused
from protocol.lifecycle import GroupState
from protocol.staleness import Policy
from services.ledger.interface import Peer
from tests.contracts.ledger_rig import Driver


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
        assert list(await driver.ledger.reports(0)) == []

    async def test_checkpoint_forgets_engines_that_are_gone_and_behind(self, driver: Driver) -> None:
        await driver.begin(B=1, engines=("eng", "gone", "behind"))
        await driver.ledger.register(Peer("rollout", "behind", {}), 600_000)
        await driver.step(1)
        await driver.ledger.checkpointed(1)
        assert set((await driver.ledger.status()).engines) == {"eng", "behind"}

    async def test_commit_refuses_what_was_not_taken(self, driver: Driver) -> None:
        await driver.begin(E=0, B=2)
        await driver.refused(
            Reason.STALE_STEP, driver.ledger.commit("e1", 0, {}, digest=1, report=b"", manifest=b"")
        )
        await driver.scored(2)
        taken = await driver.ledger.take("e1")
        await driver.refused(Reason.WRONG_STATE, driver.commit(taken, counts={0: {0: 10}}))
        await driver.refused(Reason.WRONG_STATE, driver.commit(taken, counts={0: {0: 10}, 7: {0: 10}}))
        await driver.refused(Reason.WRONG_STATE, driver.commit(taken, counts={0: {0: 10}, 1: {0: 11}}))
        await driver.refused(Reason.STALE_EPOCH, driver.commit(taken, epoch="e0"))
        await driver.refused(
            Reason.STALE_STEP,
            driver.ledger.commit("e1", 1, {0: {}, 1: {}}, digest=1, report=b"", manifest=b""),
        )
        assert await driver.commit(taken, counts={0: {}, 1: {0: 3}}) == 1

    async def test_commit_refuses_tokens_over_the_bound(self, driver: Driver) -> None:
        await driver.begin(E=1, B=1, policy=Policy.MASK, engines=("eng", "slow"))
        late = await driver.lease("slow")
        await driver.step(1)
        await driver.step(1)
        await driver.ledger.accept(late.group, late.token, {0: 4, 1: 6})
        taken = await driver.ledger.take("e1")
        await driver.refused(Reason.BOUND, driver.commit(taken, counts={late.group: {0: 4, 1: 6}}))
        assert await driver.commit(taken, counts={late.group: {1: 6}}) == 3

    async def test_no_lease_is_late_at_birth(self, driver: Driver) -> None:
        await driver.begin(E=0, B=1, policy=Policy.MASK, engines=("eng", "slow"))
        await driver.step(1)
        await driver.refused(Reason.BOUND, driver.lease("slow"))
        assert (await driver.lease("eng")).deadline == 1

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
        await driver.begin(E=1, B=1, policy=Policy.MASK, engines=("eng", "slow"))
        stale = await driver.lease("slow")
        await driver.step(1)
        await driver.step(1)
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
        await driver.step(1)  # takes it: earliest deadline, then lowest id
        await driver.scored(1)
        leased = await driver.lease()
        await driver.ledger.claim("e2")
        await driver.refused(Reason.WRONG_STATE, driver.ledger.resume("e2", 9, 1))
        assert not await driver.ledger.resume("e2", 1, 100)
        assert not await driver.ledger.resume("e2", 1, 100)
        status = await driver.ledger.status()
        assert (status.version, status.trained, status.issued) == (
            1,
            1,
            status.trained + status.active + status.dropped,
        )
        assert status.states[GroupState.LEASED] == 0
        assert await driver.ledger.manifest() is None
        await driver.refused(Reason.STALE_ENGINE, driver.lease())
        await driver.refused(Reason.STALE_EPOCH, driver.ledger.applied("eng", "e1", 1))
        await driver.refused(Reason.NOT_HELD, driver.ledger.accept(leased.group, leased.token, {2: 1}))
        await driver.ledger.applied("eng", "e2", 1)
        again = await driver.lease()
        assert (again.group, again.attempt) == (kept.group, 1)

    async def test_a_rewind_undoes_what_was_generated_under_other_weights_of_the_same_version(
        self, driver: Driver
    ) -> None:
        await driver.begin(E=2, B=1)
        await driver.step(1)
        await driver.ledger.claim("e2")
        assert not await driver.ledger.resume("e2", 1, 999)
        await driver.ledger.applied("eng", "e2", 1)
        await driver.scored(2)
        await driver.commit(await driver.ledger.take("e2"), "e2")
        await driver.ledger.claim("e3")
        assert not await driver.ledger.resume(
            "e3", 1, 100
        )  # the weights of version 1 before the first rewind
        assert (await driver.ledger.status()).states[GroupState.SCORED] == 0

    async def test_resume_cannot_go_behind_a_checkpoint(self, driver: Driver) -> None:
        await driver.begin(B=1)
        await driver.step(1)
        await driver.refused(Reason.WRONG_STATE, driver.ledger.checkpointed(2))
        await driver.ledger.checkpointed(1)
        await driver.ledger.claim("e2")
        await driver.refused(Reason.WRONG_STATE, driver.ledger.resume("e2", 0, 7))

    async def test_unpublished_version_leaves_the_manifest_of_the_one_before(self, driver: Driver) -> None:
        await driver.begin(E=1, B=1)
        await driver.ledger.publish("e1", b"m0", 0)
        await driver.step(1)
        assert ((await driver.ledger.head()).published, await driver.ledger.manifest()) == (1, b"m0")
        for step, manifest, published in ((1, b"", 1), (2, b"m3", 3)):
            lease = await driver.lease()
            await driver.ledger.accept(lease.group, lease.token, {lease.version: 1})
            taken = await driver.ledger.take("e1")
            trained = {group.group: group.counts for group in taken.groups}
            await driver.ledger.commit("e1", step, trained, digest=step, report=b"", manifest=manifest)
            assert (await driver.ledger.head()).published == published
        assert await driver.ledger.manifest() == b"m3"
        await driver.ledger.publish("e1", b"m2", 2)  # of an older version, as after a restart
        assert ((await driver.ledger.head()).published, (await driver.ledger.head()).version) == (2, 3)
        await driver.ledger.claim("e2")
        assert not await driver.ledger.resume("e2", 1, 77)
        assert ((await driver.ledger.head()).published, await driver.ledger.manifest()) == (-1, None)

    async def test_publish_sets_the_manifest_of_the_present_version(self, driver: Driver) -> None:
        await driver.begin()
        assert await driver.ledger.manifest() is None
        await driver.ledger.publish("e1", b"\x00\xff", 0)
        await driver.ledger.publish("e1", b"\x00\xff", 0)
        assert await driver.ledger.manifest() == b"\x00\xff"
        await driver.refused(Reason.WRONG_STATE, driver.ledger.publish("e1", b"", 1))
