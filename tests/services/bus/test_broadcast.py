"""Broadcaster and Listener: the newest manifest reaches every engine; a dead engine blocks nobody."""

import asyncio
from dataclasses import replace

import pytest

from protocol.errors import Unavailable
from protocol.messages import Action, Control, Hello, WeightApplied, WeightManifest
from protocol.topics import SCORED, WEIGHTS
from services.bus.broadcast import MAX_UNSENT, Broadcaster, Listener
from services.bus.config import BusConfig
from tests.services.bus.harness import DEADLINE_S, QUICK, RUN, Raw, Registry, eventually, frame, score


def manifest(version: int, location: str = "/dev/shm/x") -> WeightManifest:
    return WeightManifest(
        epoch="e", version=version, transport="shm", location=location, buckets=(), tensors=()
    )


def applied(version: int) -> WeightApplied:
    return WeightApplied(engine="engine.1", epoch="e", version=version)


def broadcaster(incarnation: str = "trainer.1", config: BusConfig = QUICK) -> Broadcaster:
    return Broadcaster(WEIGHTS, run=RUN, incarnation=incarnation, config=config)


def listener(registry: Registry, incarnation: str = "rollout.1", config: BusConfig = QUICK) -> Listener:
    return Listener(
        WEIGHTS, run=RUN, incarnation=incarnation, role="rollout", config=config, discover=registry
    )


async def test_published_message_reaches_all_and_answers_come_back() -> None:
    async with broadcaster() as trainer, asyncio.timeout(DEADLINE_S):
        registry = Registry({"trainer.1": trainer.endpoint})
        async with listener(registry, "rollout.1") as first, listener(registry, "rollout.2") as second:
            await eventually(lambda: len(trainer.peers) == 2)
            assert trainer.publish(manifest(1), epoch="e") == 2
            for engine in (first, second):
                envelope, message = await engine.receive()
                assert message == manifest(1)
                assert envelope.epoch == "e"
                engine.answer(applied(1), epoch="e")
            for _ in range(2):
                envelope, message = await trainer.answers()
                assert (envelope.epoch, message) == ("e", applied(1))
            assert trainer.stats.sent == trainer.stats.received == 2


async def test_newcomer_gets_the_newest_manifest_and_no_old_control() -> None:
    async with broadcaster() as trainer, asyncio.timeout(DEADLINE_S):
        trainer.publish(manifest(1))
        trainer.publish(manifest(2))
        assert trainer.publish(Control(action=Action.ABORT, groups=(1,))) == 0
        async with listener(Registry({"trainer.1": trainer.endpoint})) as late:
            assert (await late.receive())[1] == manifest(2)
            trainer.publish(Control(action=Action.ABORT, groups=(3,)))
            assert (await late.receive())[1] == Control(action=Action.ABORT, groups=(3,))


async def test_manifest_that_fits_no_frame_keeps_no_other_message_from_anybody() -> None:
    small = replace(QUICK, max_frame_bytes=10_000)
    async with broadcaster(config=small) as trainer, asyncio.timeout(DEADLINE_S):
        registry = Registry({"trainer.1": trainer.endpoint})
        trainer.publish(manifest(1))
        async with listener(registry, config=small) as engine:
            assert (await engine.receive())[1] == manifest(1)
            assert trainer.publish(manifest(2, "x" * 10_000)) == 0
            assert trainer.publish(Control(action=Action.ABORT, groups=(3,))) == 1
            assert (await engine.receive())[1] == Control(action=Action.ABORT, groups=(3,))
        async with listener(registry, "rollout.2", small) as late:
            await eventually(lambda: "rollout.2" in trainer.peers)
            assert trainer.publish(manifest(3)) >= 1
            assert (await late.receive())[1] == manifest(3)
        assert trainer.stats.dropped_full == 1


async def test_listener_follows_a_restarted_trainer() -> None:
    registry = Registry()
    async with listener(registry) as engine, asyncio.timeout(DEADLINE_S):
        for life in (1, 2):
            async with broadcaster(f"trainer.{life}") as trainer:
                registry.clear()
                registry[f"trainer.{life}"] = trainer.endpoint
                trainer.publish(manifest(life))
                assert (await engine.receive())[1] == manifest(life)
                engine.answer(applied(life))
                assert (await trainer.answers())[1] == applied(life)


async def test_answer_waits_for_a_connection() -> None:
    registry = Registry()
    async with broadcaster() as trainer, listener(registry) as engine, asyncio.timeout(DEADLINE_S):
        for version in range(MAX_UNSENT + 3):
            engine.answer(applied(version))
        registry["trainer.1"] = trainer.endpoint
        versions = [(await trainer.answers())[1] for _ in range(MAX_UNSENT)]
        assert versions == [applied(version) for version in range(3, MAX_UNSENT + 3)]
        assert engine.stats.dropped_full == 3


async def test_peer_whose_queue_is_full_is_counted_and_gets_the_newest_later() -> None:
    config = replace(QUICK, high_water_mark=2)
    async with (
        broadcaster(config=config) as trainer,
        Raw(trainer.endpoint, hwm=1) as stuck,
        asyncio.timeout(DEADLINE_S),
    ):
        async with listener(Registry({"trainer.1": trainer.endpoint}), config=QUICK) as engine:
            await stuck.say(frame(Hello(sender="stuck.1", role="rollout")))
            await eventually(lambda: len(trainer.peers) == 2)
            version = 0
            while not trainer.stats.dropped_full:
                version += 1
                trainer.publish(manifest(version, "x" * 1_000_000))
                message = (await engine.receive())[1]
                assert isinstance(message, WeightManifest)
                assert message.version == version
            newest = 0
            while newest < version:
                message = await stuck.hear()
                newest = max(newest, message.version if isinstance(message, WeightManifest) else 0)


async def test_dead_peer_is_forgotten() -> None:
    async with broadcaster() as trainer:
        registry = Registry({"trainer.1": trainer.endpoint})
        async with listener(registry, "rollout.1") as alive, asyncio.timeout(DEADLINE_S):
            async with listener(registry, "rollout.2"):
                await eventually(lambda: len(trainer.peers) == 2)
            await eventually(lambda: trainer.peers == ("rollout.1",))
            assert trainer.publish(manifest(1)) == 1
            assert (await alive.receive())[1] == manifest(1)


async def test_answers_that_nobody_reads_are_bounded() -> None:
    config = replace(QUICK, high_water_mark=4)
    async with (
        broadcaster(config=config) as trainer,
        Raw(trainer.endpoint) as raw,
        asyncio.timeout(DEADLINE_S),
    ):
        await raw.hello()
        for version in range(10):
            await raw.say(frame(applied(version), f"a{version}"))
        await eventually(lambda: trainer.stats.received == 10)
        assert trainer.stats.dropped_full == 6
        assert (await trainer.answers())[1] == applied(6)


async def test_noise_is_counted() -> None:
    async with broadcaster() as trainer, Raw(trainer.endpoint) as raw, asyncio.timeout(DEADLINE_S):
        await raw.say(frame(applied(1), "a1"))
        await eventually(lambda: trainer.stats.unknown_peer == 1)
        await raw.say(b"noise")
        await raw.say(frame(score(1), "m1"))
        await raw.say(b"", b"")
        await raw.say(frame(Hello(sender="s", role="rollout"), run="another"))
        await eventually(lambda: trainer.stats.malformed == 4)
        assert trainer.peers == ()


async def test_message_of_another_topic_is_refused() -> None:
    async with broadcaster() as trainer, listener(Registry()) as engine:
        with pytest.raises(TypeError):
            trainer.publish(score(1))
        with pytest.raises(TypeError):
            engine.answer(manifest(1))
    with pytest.raises(TypeError):
        Broadcaster(SCORED, run=RUN, incarnation="t", config=QUICK)
    with pytest.raises(TypeError):
        Listener(SCORED, run=RUN, incarnation="t", role="rollout", config=QUICK, discover=Registry())
    with pytest.raises(Unavailable):
        await trainer.answers()
    with pytest.raises(Unavailable):
        await engine.receive()
