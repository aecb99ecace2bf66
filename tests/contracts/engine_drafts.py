"""Tests that every engine must pass with versions that are still being exported.

The suite is `rollout/engines/contract/suite.py`.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from protocol.errors import WeightError
from protocol.messages import WeightManifest
from protocol.weights.provisional import provisional_manifest
from rollout.engines.contract.bench import PROMPTS, Bench
from rollout.engines.contract.suite import assert_switched
from tests.trainer.weights.making import WAIT_S, Making
from tests.trainer.weights.senders import part_sender
from trainer.config import WeightConfig
from trainer.weights.served.sender import PartSender


class DraftContract:
    async def test_provisional_version_is_committed_from_the_bytes_that_arrived(self, bench: Bench) -> None:
        if bench.shares:
            await assert_staged_as_it_comes(bench)
            return
        if bench.layers:
            with pytest.raises(WeightError, match="'layers', which reads a version twice"):
                async with serving(bench):
                    pass
            await bench.serve("B")
            return
        async with serving(bench) as (sender, before):
            draft, making = next_of(bench, sender, before), Making(bench.published["B"].items())
            async with bench.long(*PROMPTS) as tasks, asyncio.TaskGroup() as group:
                staging = group.create_task(bench.engine.stage(draft), name="stage")
                made = group.create_task(
                    asyncio.to_thread(sender.publish, "e1", draft.version, making), name="publish"
                )
                making.let(1)
                await bench.pilot("during")
                assert not staging.done()
                with pytest.raises(WeightError):
                    await bench.engine.commit(draft)
                making.let()
                manifest = await made
                await staging
                with pytest.raises(WeightError):
                    await bench.engine.commit(draft)
                assert bench.engine.served.version == before.version
                await bench.engine.stage(draft)
                await asyncio.to_thread(sender.close)  # nobody is there any more to fetch it from
                await bench.engine.stage(manifest)
                await bench.engine.commit(manifest)
                await bench.pilot("after")
        assert bench.engine.served.digest == manifest.digest
        found = [task.result() for task in tasks]
        assert [[version for _, version in completion.spans] for completion in found] == [
            [before.version, manifest.version]
        ] * len(found)
        if bench.computes:
            assert_switched(bench, found, [["A", "B"]] * len(found))

    async def test_bytes_that_arrived_are_not_committed_as_another_version(self, bench: Bench) -> None:
        if bench.shares or bench.layers:
            pytest.skip("versions are not sent to this engine")
        async with serving(bench) as (sender, before):
            live = await bench.engine.live_digest()
            draft = next_of(bench, sender, before)
            async with asyncio.TaskGroup() as group:
                staging = group.create_task(bench.engine.stage(draft), name="stage")
                await asyncio.to_thread(sender.publish, "e1", draft.version, bench.published["A"].items())
                await staging
            manifest = await asyncio.to_thread(
                sender.publish, "e1", draft.version, bench.published["B"].items()
            )
            with pytest.raises(WeightError):
                await bench.engine.commit(manifest)
            assert (bench.engine.served.version, await bench.engine.live_digest()) == (before.version, live)
            await bench.engine.stage(manifest)
            await bench.engine.commit(manifest)
            assert bench.engine.served.digest == manifest.digest
            assert not bench.computes or await bench.engine.live_digest() != live

    async def test_provisional_version_that_fails_changes_nothing(self, bench: Bench) -> None:
        if bench.shares or bench.layers:
            pytest.skip("versions are not sent to this engine")
        async with serving(bench) as (sender, before):
            draft, making = next_of(bench, sender, before), Making(bench.published["B"].items())
            making.fails = True
            async with asyncio.TaskGroup() as group:
                staging = group.create_task(_outcome(bench, draft), name="stage")
                making.let()
                with pytest.raises(WeightError, match="cannot be made"):
                    await asyncio.to_thread(sender.publish, "e1", draft.version, making)
            assert isinstance(staging.result(), WeightError)
            assert bench.engine.served.version == before.version
        await bench.serve("B")


@asynccontextmanager
async def serving(bench: Bench) -> AsyncIterator[tuple[PartSender, WeightManifest]]:
    """A sender, and its manifest that the engine serves: the weights of model A."""
    sender = part_sender(
        WeightConfig(transport="nccl", backend="gloo", bucket_mb=1, timeout_s=WAIT_S),
        bench.published["A"].items(),
    )
    try:
        bench.last += 1
        manifest = await asyncio.to_thread(sender.publish, "e1", bench.last, bench.published["A"].items())
        await bench.engine.stage(manifest)
        await bench.engine.commit(manifest)
        yield sender, manifest
    finally:
        await asyncio.to_thread(sender.close)


def next_of(bench: Bench, sender: PartSender, before: WeightManifest) -> WeightManifest:
    """The next version, which may be asked for from now on."""
    bench.last += 1
    announced = sender.provisional("e1", bench.last)
    assert announced is not None
    assert announced.like == before.version
    return provisional_manifest(before, announced.version)


async def assert_staged_as_it_comes(bench: Bench) -> None:
    """Check that a provisional version is staged although nothing is sent."""
    await bench.serve("A")
    manifest = bench.publish("B")
    draft = provisional_manifest(manifest, manifest.version)
    await bench.engine.stage(draft)
    with pytest.raises(WeightError):
        await bench.engine.commit(draft)
    await bench.engine.stage(manifest)
    await bench.engine.commit(manifest)
    assert bench.engine.served.digest == manifest.digest


async def _outcome(bench: Bench, draft: WeightManifest) -> WeightError | None:
    try:
        await bench.engine.stage(draft)
    except WeightError as error:
        return error
    return None
