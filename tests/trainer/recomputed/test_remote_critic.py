"""PPO whose critic has ranks of its own is what a naive loop over Hugging Face computes, in every backend."""

from pathlib import Path

import pytest

from tests.trainer.megatron.launch import launch
from tests.trainer.megatron.layouts import LAYOUTS
from tests.trainer.recomputed.cases import CASES
from tests.trainer.recomputed.naive_run import assert_naive

FEW = ("ppo-kl-in-reward", "ppo-two-updates")
ALL = tuple(name for name, case in CASES.items() if case.has_critic)

pytestmark = pytest.mark.xdist_group("layouts")  # what naive loops compute is there once


@pytest.mark.parametrize(
    ("backend", "layout", "critic", "names"),
    [
        ("reference", "single", (1, 1), FEW),
        pytest.param("reference", "single", (1, 1), ALL, marks=pytest.mark.slow),
        pytest.param("fsdp", "dp2", (3, 1), ALL, marks=pytest.mark.slow),
        pytest.param("megatron", "dp2", (2, 2), ALL, marks=pytest.mark.slow),
        pytest.param("megatron", "tp2", (2, 1), ALL, marks=pytest.mark.slow),
    ],
)
def test_a_critic_apart_is_the_naive_loops(
    backend: str,
    layout: str,
    critic: tuple[int, int],
    names: tuple[str, ...],
    directory: Path,
    tmp_path: Path,
) -> None:
    arguments = (backend, layout, *map(str, critic), str(directory), str(tmp_path), *names)
    ranks = LAYOUTS[layout].world_size + critic[0]
    launch(ranks, "tests.trainer.recomputed.remote_ranks", *arguments, logs=tmp_path / "logs")
    for name in names:
        assert_naive(name, directory, tmp_path)
