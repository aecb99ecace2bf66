"""Drives the ledger on Redis and the oracle in memory through many histories; they must agree after every call."""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from protocol.staleness import Policy
from tests.services.ledger.machine import DISTURB, PROGRESS, Machine


def run(url: str, examples: int) -> None:
    checks = settings(
        max_examples=examples, stateful_step_count=10, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
    )
    run_state_machine_as_test(type("ServerMachine", (Machine,), {"url": url}), settings=checks)  # type: ignore[no-untyped-call]


def walk(url: str, seed: int, moves: int) -> Machine:
    """A long run of random moves, deeper than Hypothesis goes."""
    machine: Machine = type("ServerMachine", (Machine,), {"url": url})()
    try:
        pick = random.Random(seed).choice
        machine.create(
            E=pick((0, 1, 2)), B=pick((1, 2, 3)), policy=pick(list(Policy)), prompts=pick((None, None, 30)), steps=pick((5, 500)),
            attempts=pick((2, 5)), window=pick((8, 64)),
        )  # fmt: skip
        for _ in range(moves):
            machine.play(pick(PROGRESS * 6 + DISTURB + ["restart"]), pick)
            machine.rule_f_holds()
        machine.all_equal()
    finally:
        machine.teardown()
    return machine


def test_valkey_follows_the_oracle(valkey_url: str) -> None:
    run(valkey_url, 30)


def test_redis_follows_the_oracle(redis_url: str) -> None:
    run(redis_url, 10)


@pytest.mark.parametrize("seed", range(10))
def test_valkey_follows_the_oracle_on_long_walks(valkey_url: str, seed: int) -> None:
    walk(valkey_url, seed, 300)
