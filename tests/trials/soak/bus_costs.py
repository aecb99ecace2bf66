"""Measures the CPU of the bus per message, heartbeat, published version and sharing of a window.

Both ends run in this process, so a figure includes sender, receiver and ZeroMQ's threads; half of it is each
end's.
"""

import asyncio
import time

import numpy as np
import zmq

from protocol.codec import encode
from protocol.ids import new_token
from protocol.messages import Hello, Rollout, WeightManifest
from protocol.tensors import Array
from protocol.topics import ROLLOUTS, SCORED, WEIGHTS, Role, Topic
from services.bus.broadcast import Broadcaster
from services.bus.config import BusConfig
from services.bus.peers import Account, top_up
from services.bus.receiver import Receiver
from services.bus.sender import Sender

RUN = "costs"


def small_rollout(samples: int = 2, tokens: int = 8) -> Rollout:
    """Return a rollout as the scripted engine makes them."""
    total = samples * tokens
    return Rollout(
        group=7, token=new_token(), engine="engine.0a1b2c3d", prompt_tokens=Array.of(range(4), "int32"),
        lengths=Array.of([tokens] * samples, "int32"), tokens=Array.of(range(total), "int32"),
        logprobs=Array.of(-np.ones(total), "float32"), loss_mask=Array.of([], "uint8"),
        spans=Array.of([[i, tokens, 0] for i in range(samples)], "int32"), finish_reasons=("stop",) * samples,
        responses=("",) * samples,
    )  # fmt: skip


async def message_micros(count: int) -> float:
    """Measure one small rollout: sent, received, acknowledged."""
    topic = Topic(
        ROLLOUTS.name,
        Role.ROLLOUT,
        Role.REWARD,
        pattern=ROLLOUTS.pattern,
        carries=(Rollout,),
    )
    async with Receiver(topic, run=RUN, incarnation="receiver", config=BusConfig()) as receiver:

        async def discover() -> dict[str, str]:
            return {"receiver": receiver.endpoint}

        async def take_loop() -> None:
            while True:
                receiver.ack(await receiver.receive())

        async with Sender(
            topic, run=RUN, incarnation="sender", role=Role.ROLLOUT, config=BusConfig(), discover=discover
        ) as sender:
            async with asyncio.TaskGroup() as tasks:
                taking = tasks.create_task(take_loop())
                message = small_rollout()
                for _ in range(50):
                    await sender.send(message)
                before = time.process_time()
                for _ in range(count // 8):
                    async with asyncio.TaskGroup() as batch:
                        for _ in range(8):
                            batch.create_task(sender.send(message))
                spent = time.process_time() - before
                taking.cancel()
    return spent / (count // 8 * 8) * 1e6


class Crowd:
    """Connections that sent a hello to an endpoint; only `drain` reads them."""

    def __init__(self, endpoint: str, count: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4 * count + 100)
        self._context.setsockopt(zmq.LINGER, 0)
        self.sockets = [self._context.socket(zmq.DEALER) for _ in range(count)]
        for index, socket in enumerate(self.sockets):
            socket.connect(endpoint)
            socket.send(encode(Hello(sender=f"rollout.{index}", role=Role.ROLLOUT), run=RUN, id=""))

    def drain(self) -> int:
        """Read what has arrived; return the number of frames."""
        found = 0
        for socket in self.sockets:
            try:
                while True:
                    socket.recv(zmq.NOBLOCK)
                    found += 1
            except zmq.Again:
                continue
        return found

    def close(self) -> None:
        self._context.destroy(0)


async def version_micros(engines: int, versions: int) -> float:
    """Measure one version published to one engine."""
    async with Broadcaster(WEIGHTS, run=RUN, incarnation="trainer", config=BusConfig()) as caster:
        crowd = Crowd(caster.endpoint, engines)
        try:
            async with asyncio.timeout(600):
                while len(caster.peers) < engines:  # noqa: ASYNC110 (a plain property)
                    await asyncio.sleep(0.05)
            crowd.drain()
            before = time.process_time()
            for version in range(versions):
                caster.publish(manifest(version))
                await asyncio.sleep(0)
            spent = time.process_time() - before
        finally:
            crowd.close()
    return spent / engines / versions * 1e6


async def heartbeat_micros(senders: int, seconds: float) -> float:
    """Measure one heartbeat to one idle connection."""
    async with Receiver(SCORED, run=RUN, incarnation="ingest", config=BusConfig()) as receiver:
        crowd = Crowd(receiver.endpoint, senders)
        try:
            async with asyncio.timeout(600):
                while len(receiver._sessions.snapshot()) < senders:  # noqa: ASYNC110 (a plain method)
                    await asyncio.sleep(0.05)
            crowd.drain()
            before, sent = time.process_time(), receiver.stats.bytes_out
            await asyncio.sleep(seconds)
            spent, frames = time.process_time() - before, crowd.drain()
        finally:
            crowd.close()
    return spent / max(frames, 1) * 1e6 if receiver.stats.bytes_out > sent else 0.0


def window_micros(senders: int, rounds: int = 20) -> float:
    """Measure sharing a window among `senders`, which a receiver does for each message and ack."""
    accounts = [Account() for _ in range(senders)]
    top_up(ROLLOUTS.window, accounts)
    began = time.process_time()
    for _ in range(rounds):
        top_up(ROLLOUTS.window, accounts)
    return (time.process_time() - began) / rounds * 1e6


def manifest(version: int) -> WeightManifest:
    """Return a manifest without tensors: the cost of its size is the network's, not the bus's."""
    return WeightManifest(version=version, epoch="e", transport="shm", location="", buckets=(), tensors=())
