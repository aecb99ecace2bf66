"""Every recipe on sharded models is what a naive loop over Hugging Face computes."""

from pathlib import Path

import pytest

from tests.changes import slow_unless_changed
from tests.trainer.megatron.launch import launch
from tests.trainer.megatron.layouts import LAYOUTS
from tests.trainer.recomputed.cases import CASES
from tests.trainer.recomputed.naive_run import assert_naive
from tests.trainer.recomputed.ranks import run

CHANGED = slow_unless_changed(
    "trainer/fsdp/", "trainer/layers/", "trainer/functional/", "trainer/algorithms/", "trainer/roles/",
    "trainer/step/", "tests/trainer/recomputed/",
)  # fmt: skip
FEW = ("rejection-geometric", "ppo-kl-in-reward", "kl-in-reward-path", "branches-ppo", "reward-model")
MANY_RANKS = ("dp2", "tp2", "tp2-dp2")

pytestmark = pytest.mark.xdist_group("layouts")  # what naive loops compute is there once


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_one_rank_is_the_naive_loop(name: str, directory: Path, tmp_path: Path) -> None:
    run("fsdp", "single", directory, tmp_path, [name])
    assert_naive(name, directory, tmp_path)


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        pytest.param("dp2", FEW, marks=CHANGED, id="dp2-few"),
        pytest.param("tp2", FEW, marks=CHANGED, id="tp2-few"),
        *(pytest.param(layout, tuple(CASES), marks=pytest.mark.slow, id=layout) for layout in MANY_RANKS),
    ],
)
def test_several_ranks_are_the_naive_loop(
    layout: str, names: tuple[str, ...], directory: Path, tmp_path: Path
) -> None:
    arguments = ("fsdp", layout, str(directory), str(tmp_path), *names)
    launch(LAYOUTS[layout].world_size, "tests.trainer.recomputed.ranks", *arguments, logs=tmp_path / "logs")
    for name in names:
        assert_naive(name, directory, tmp_path)
