"""Messages/s of the bus against bare pyzmq: `python -m tests.benchmarks.bus`.

A producer process sends 133 KB trajectories over loopback to a consumer process. Bare means: the same socket
types, encoding and decoding with checksums, blocking calls, and nothing else. Both ways alternate; the
medians are compared. CPU time a message, of both ends and all their threads, depends less on what else runs.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import uvloop
import zmq

from protocol.codec import decode, encode
from protocol.ids import new_token
from protocol.messages import Rollout
from protocol.tensors import Array
from protocol.topics import Pattern, Role, Topic
from services.bus.config import BusConfig
from services.bus.receiver import Receiver
from services.bus.sender import Sender
from tests.benchmarks.table import Figure, Run, figure

ROOT = Path(__file__).parents[2]
TRAJECTORIES = Topic("trajectories", Role.ROLLOUT, Role.REWARD, pattern=Pattern.DELIVER, carries=(Rollout,))
WARM_UP = 500
MESSAGES = 8000
REPEATS = 7


def trajectory() -> Rollout:
    """512 prompt tokens and 8 samples of 2048 tokens: 133 KB of ids and log-probabilities."""
    rng = np.random.default_rng(0)
    total = 8 * 2048
    return Rollout(
        group=7,
        token=new_token(),
        engine="engine.0a1b2c3d",
        prompt_tokens=Array.of(rng.integers(0, 150_000, 512), "int32"),
        lengths=Array.of([2048] * 8, "int32"),
        tokens=Array.of(rng.integers(0, 150_000, total), "int32"),
        logprobs=Array.of(-rng.random(total), "float32"),
        loss_mask=Array.of([], "uint8"),
        spans=Array.of([[i, 2048, 0] for i in range(8)], "int32"),
        finish_reasons=("stop",) * 8,
        responses=("",) * 8,
    )


class Clock:
    """Wall and CPU time of this process since it was made or `reset`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()

    def report(self, messages: int) -> None:
        """Print messages/s, and CPU microseconds a message."""
        cpu_s = time.process_time() - self._cpu_s
        print(messages / (time.perf_counter() - self._wall_s), cpu_s / messages * 1e6, flush=True)


def bare_consumer() -> None:
    """Receive and decode; print the endpoint, then what it took after the warm-up."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    print(f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}", flush=True)
    clock = Clock()
    for count in range(WARM_UP + MESSAGES):
        if count == WARM_UP:
            clock.reset()
        peer = socket.recv()
        _, message = decode(socket.recv(copy=False).buffer)
        assert isinstance(message, Rollout)
    clock.report(MESSAGES)
    socket.send_multipart([peer, b"done"])
    socket.close(1000)


def bare_producer(endpoint: str) -> None:
    """Encode and send, then wait until the consumer has all."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(endpoint)
    message = trajectory()
    clock = Clock()
    for _ in range(WARM_UP + MESSAGES):
        socket.send(encode(message, run="bench", id=new_token(), group=7, token=message.token))
    socket.recv()
    clock.report(WARM_UP + MESSAGES)
    socket.close(0)


async def bus_consumer() -> None:
    """Receive and acknowledge; print the endpoint, then what it took after the warm-up."""
    async with Receiver(TRAJECTORIES, run="bench", incarnation="consumer", config=BusConfig()) as receiver:
        print(receiver.endpoint, flush=True)
        clock = Clock()
        for count in range(WARM_UP + MESSAGES):
            if count == WARM_UP:
                clock.reset()
            delivery = await receiver.receive()
            assert isinstance(delivery.message, Rollout)
            receiver.ack(delivery)
        clock.report(MESSAGES)
        await asyncio.to_thread(sys.stdin.read)  # the producer ends when it has every acknowledgement


async def bus_producer(endpoint: str, senders: int = 64) -> None:
    """Keep `senders` messages on their way until all are acknowledged."""

    async def discover() -> dict[str, str]:
        return {"consumer": endpoint}

    async def send_loop(share: int) -> None:
        for _ in range(share):
            await sender.send(message, group=7, token=message.token)

    message = trajectory()
    total = WARM_UP + MESSAGES
    clock = Clock()
    async with Sender(
        TRAJECTORIES,
        run="bench",
        incarnation="producer",
        role="rollout",
        config=BusConfig(),
        discover=discover,
    ) as sender:
        async with asyncio.TaskGroup() as group:
            for index in range(senders):
                group.create_task(send_loop(total // senders + (index < total % senders)))
    clock.report(total)


def _measure(kind: str) -> Run:
    """Return messages/s as the consumer saw them, and the CPU time of both ends."""
    command = [sys.executable, "-m", "tests.benchmarks.bus"]
    with subprocess.Popen(
        [*command, f"{kind}-consumer"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as consumer:
        assert consumer.stdout is not None
        endpoint = consumer.stdout.readline().strip()
        try:
            producer = subprocess.run(
                [*command, f"{kind}-producer", endpoint],
                cwd=ROOT,
                check=True,
                timeout=120,
                stdout=subprocess.PIPE,
                text=True,
            )
            output, _ = consumer.communicate(timeout=60)
        except BaseException:
            consumer.kill()
            raise
    (_, sent_us), (rate, received_us) = (text.split() for text in (producer.stdout, output))
    return {
        f"{kind}_messages_per_s": float(rate),
        f"{kind}_cpu_us": float(sent_us) + float(received_us),
    }


def run(repeats: int = REPEATS) -> dict[str, float]:
    """Rates and CPU time of both, and `ratio_to_bare_zmq`: medians over alternating runs."""
    runs = _alternate(repeats)
    found = {name: statistics.median(one[name] for one in runs) for name in runs[0]}
    size = len(encode(trajectory(), run="bench", id=new_token()))
    return {
        "bytes": size,
        **{name: round(value) for name, value in found.items()},
        "ratio_to_bare_zmq": round(found["bus_messages_per_s"] / found["bare_messages_per_s"], 3),
        "cpu_to_bare_zmq": round(found["bus_cpu_us"] / found["bare_cpu_us"], 3),
    }


def figures(directory: Path, *, quick: bool = False) -> tuple[dict[str, Figure], list[str]]:
    """`bus.ratio_to_bare_zmq` and `bus.cpu_us`; nothing is written to `directory`."""
    runs = _alternate(1 if quick else REPEATS)
    row = figure(
        runs, "bus_messages_per_s", unit="messages/s of 133 KB", reference="bare_messages_per_s", aim=0.8
    )
    cpu = figure(runs, "bus_cpu_us", unit="CPU us a message, both ends", reference="bare_cpu_us")
    return {"bus.ratio_to_bare_zmq": row, "bus.cpu_us": cpu}, []


def _alternate(repeats: int) -> list[Run]:
    return [{**_measure("bare"), **_measure("bus")} for _ in range(repeats)]


def main() -> None:
    """Print the result as JSON, or be one of its processes."""
    match sys.argv[1:]:
        case ["bare-consumer"]:
            bare_consumer()
        case ["bare-producer", endpoint]:
            bare_producer(endpoint)
        case ["bus-consumer"]:
            uvloop.run(bus_consumer())
        case ["bus-producer", endpoint]:
            uvloop.run(bus_producer(endpoint))
        case _:
            print(json.dumps(run(), indent=2))


if __name__ == "__main__":
    main()
