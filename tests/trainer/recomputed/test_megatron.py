"""Every recipe in every layout of Megatron ranks is what a naive loop over Hugging Face computes."""

from pathlib import Path

import pytest

from tests.changes import slow_unless_changed
from tests.trainer.megatron.launch import launch
from tests.trainer.megatron.layouts import LAYOUTS
from tests.trainer.recomputed.cases import CASES
from tests.trainer.recomputed.naive_run import assert_naive
from tests.trainer.recomputed.ranks import run

FEW = ("rejection-geometric", "ppo-kl-in-reward")
OTHER_MODELS = (
    "on_policy_distillation-rewards",
    "kl-in-reward-path",
    "sft",
    "branches-ppo",
    "branches-reward-model",
)
CHANGED = slow_unless_changed(
    "trainer/megatron/", "trainer/layers/", "trainer/functional/", "trainer/algorithms/", "trainer/roles/",
    "trainer/step/", "tests/trainer/recomputed/",
)  # fmt: skip
MANY_RANKS = ("tp2", "tp2-sequence", "pp2", "cp2", "dp2", "tp2-dp2")

pytestmark = pytest.mark.xdist_group("layouts")  # what naive loops compute is there once


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FEW else [pytest.mark.slow]) for name in CASES]
)
def test_one_rank_is_the_naive_loop(name: str, directory: Path, tmp_path: Path) -> None:
    run("megatron", "single", directory, tmp_path, [name])
    assert_naive(name, directory, tmp_path)


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        pytest.param("tp2", OTHER_MODELS, marks=CHANGED, id="tp2-other-models"),
        *(pytest.param(layout, tuple(CASES), marks=pytest.mark.slow, id=layout) for layout in MANY_RANKS),
    ],
)
def test_every_layout_is_the_naive_loop(
    layout: str, names: tuple[str, ...], directory: Path, tmp_path: Path
) -> None:
    arguments = ("megatron", layout, str(directory), str(tmp_path), *names)
    module = "tests.trainer.recomputed.ranks"
    launch(LAYOUTS[layout].world_size, module, *arguments, logs=tmp_path / "logs")
    for name in names:
        assert_naive(name, directory, tmp_path)
