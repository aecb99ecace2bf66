"""The projection's arithmetic, against numbers computed by hand."""

from dataclasses import fields, replace

import pytest

from tests.trials.soak.projection import Costs, Load, cores, parts, saturation

FREE = Costs(**{field.name: 0.0 for field in fields(Costs)})
LOAD = Load(workers=100, rewards=4, groups_per_worker_s=0.5, versions_per_s=0.1, refused_per_worker_s=2.0)


def test_groups_cost_ledger_ingest_and_rewards() -> None:
    needed = parts(cores(replace(FREE, ledger_group=100, ingest_group=200, reward_group=400), LOAD))
    assert needed == pytest.approx(
        {"ledger": 50 * 100e-6, "ingest": 50 * 200e-6, "trainer loop": 0, "reward": 50 / 4 * 400e-6}
    )


def test_workers_cost_without_any_group() -> None:
    costs = replace(FREE, ledger_refused=10, ledger_register=30, ledger_look=5, heartbeat=20)
    needed = cores(costs, replace(LOAD, groups_per_worker_s=0, versions_per_s=0))
    assert needed["ledger: leases refused"] == pytest.approx(200 * 10e-6)
    assert needed["ledger: registry and news"] == pytest.approx(
        (104 * 0.6 * 30 + (100 * 5 + 4 * 2) * 5) * 1e-6
    )
    assert (needed["ingest"], needed["trainer loop"], needed["reward"]) == pytest.approx(
        (4 * 2 * 20e-6, 200 * 20e-6, 200 * 20e-6)
    )


def test_versions_cost_by_engine() -> None:
    costs = replace(
        FREE, ledger_applied=20, ledger_manifest=10, ingest_applied=5, trainer_answer=100, trainer_listed=4
    )
    needed = parts(cores(costs, LOAD))
    assert needed == pytest.approx(
        {"ledger": 10 * 30e-6, "ingest": 10 * 5e-6, "trainer loop": 10 * 104e-6, "reward": 0}
    )


def test_saturation_names_the_first_part_and_the_last_number_of_workers_that_fits() -> None:
    costs = replace(FREE, ledger_group=100, ingest_group=250)
    part, workers = saturation(costs, LOAD, workers_per_reward=25)
    assert (part, workers) == ("ingest", 8000)
    at = cores(costs, replace(LOAD, workers=workers))
    assert at["ingest"] == pytest.approx(1.0)
