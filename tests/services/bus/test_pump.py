"""`make_context`: what a message takes while it waits or is held."""

import zmq

from services.bus.pump import make_context
from tests.trials.soak.census import census

MESSAGES, BYTES = 500, 150


def test_a_small_message_that_is_held_takes_little_more_than_its_size() -> None:
    context = make_context()
    try:
        inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        outbox.connect(f"tcp://127.0.0.1:{inbox.bind_to_random_port('tcp://127.0.0.1')}")
        held, before = [], census()["malloc"]
        for _ in range(MESSAGES):  # each is read from the network alone, as in a run
            outbox.send(bytes(BYTES))
            held.append(inbox.recv(copy=False))
        assert (census()["malloc"] - before) / len(held) < 10 * BYTES
    finally:
        context.destroy(0)
