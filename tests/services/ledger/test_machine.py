"""Drives the ledger on Redis and the oracle in memory through many histories; they must agree after every
call."""

import asyncio
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from protocol.staleness import Policy
from services.ledger.embedded_server import EmbeddedServer
from tests.changes import slow_unless_changed
from tests.services.ledger.conftest import redis_binary, valkey_binary
from tests.services.ledger.machine import DISTURB, PROGRESS, Machine

CHANGED = slow_unless_changed(
    "services/ledger/", "protocol/", "tests/services/ledger/", "tests/contracts/memory_ledger/"
)


def run(url: str, examples: int, *, derandomize: bool = True) -> None:
    checks = settings(
        max_examples=examples,
        stateful_step_count=10,
        derandomize=derandomize,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    run_state_machine_as_test(type("ServerMachine", (Machine,), {"url": url}), settings=checks)  # type: ignore[no-untyped-call]


def walk(url: str, seed: int, moves: int, interrupt: Callable[[], None] = lambda: None) -> Machine:
    """A long run of random moves, deeper than Hypothesis goes; `interrupt` is called after every 40."""
    machine: Machine = type("ServerMachine", (Machine,), {"url": url})()
    try:
        pick = random.Random(seed).choice
        machine.create(
            E=pick((0, 1, 2)),
            B=pick((1, 2, 3)),
            policy=pick(list(Policy)),
            prompts=pick((None, None, 30)),
            steps=pick((5, 500)),
            attempts=pick((2, 5)),
            window=pick((8, 64)),
        )
        for n in range(1, moves + 1):
            machine.play(pick(PROGRESS * 6 + DISTURB + ["restart", "rebuild"]), pick)
            if n % 40 == 0:
                interrupt()
            machine.rule_f_holds()
        machine.all_equal()
    finally:
        machine.teardown()
    return machine


def test_valkey_follows_the_oracle(valkey_url: str) -> None:
    run(valkey_url, 20)


def test_redis_follows_the_oracle(redis_url: str) -> None:
    run(redis_url, 8)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=CHANGED) for seed in range(2, 6))])
def test_valkey_follows_the_oracle_on_long_walks(valkey_url: str, seed: int) -> None:
    walk(valkey_url, seed, 300)


@pytest.mark.parametrize("binary", [valkey_binary, redis_binary])
def test_a_server_that_is_killed_again_and_again_follows_the_oracle(
    binary: Callable[[], str], tmp_path: Path
) -> None:
    """With `appendfsync always`, as it runs in production: no acknowledged write is lost."""
    servers = [EmbeddedServer(tmp_path, binary())]
    url = asyncio.run(servers[0].start())

    def kill() -> None:
        os.kill(servers[-1].pid, signal.SIGKILL)
        while servers[-1].running():
            os.sched_yield()
        servers.append(EmbeddedServer(tmp_path, binary()))
        assert asyncio.run(servers[-1].start()) == url

    walk(url, 1, 160, kill)
    asyncio.run(servers[-1].stop())


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_redis_follows_the_oracle_through_a_thousand_histories(redis_url: str) -> None:
    run(redis_url, 1000, derandomize=False)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_valkey_follows_the_oracle_on_a_thousand_long_walks(valkey_url: str) -> None:
    for seed in range(1000, 2000):
        walk(valkey_url, seed, 300)
