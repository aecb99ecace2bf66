"""Tests the schedules of the learning rate, against Megatron-core's own."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from protocol.errors import SettingsError
from trainer.config import OptimizerConfig
from trainer.functional.learning_rate import STYLES, learning_rate


@pytest.mark.parametrize("style", sorted(STYLES))
@pytest.mark.parametrize("warmup", [0, 4])
def test_every_style_is_megatrons(style: Any, warmup: int) -> None:
    config = OptimizerConfig(
        lr=0.5,
        min_lr=0.125 if style != "constant" else 0.0,
        lr_warmup_steps=warmup,
        lr_decay_style=style,
        lr_decay_steps=20,
        lr_wsd_decay_steps=6,
    )
    group = {"max_lr": 0.5, "min_lr": config.min_lr}
    scheduler = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]),
        init_lr=0.0,
        max_lr=0.5,
        min_lr=config.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=20,
        lr_decay_style=style,
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=20,
        wd_incr_style="constant",
        wsd_decay_steps=6,
        lr_wsd_decay_style="linear",
    )
    for made in range(26):
        scheduler.num_steps = made + 1
        assert learning_rate(config, made) == pytest.approx(scheduler.get_lr(group)), made


def test_the_first_step_of_a_warmup_is_not_lost() -> None:
    assert [learning_rate(OptimizerConfig(lr=1.0, lr_warmup_steps=4), made) for made in range(6)] == [
        0.25, 0.5, 0.75, 1.0, 1.0, 1.0,
    ]  # fmt: skip


SCHEDULE = """
def halved(update, config):
    return config.lr / 2 ** update

def wrong(update, config):
    return {1: float("nan"), 2: -1.0, 3: "0.1"}[update]
"""


@pytest.fixture
def schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_schedule_of_test.py").write_text(SCHEDULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "own_schedule_of_test"


def test_a_schedule_of_the_user_is_asked_after_the_warmup(schedule: str) -> None:
    config = OptimizerConfig(lr=1.0, lr_warmup_steps=2, lr_decay_style=f"{schedule}:halved")
    assert [learning_rate(config, made) for made in range(4)] == [0.5, 1.0, 0.25, 0.125]


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (0, r"raised for update 0 at .*own_schedule_of_test.py:6: KeyError"),
        (1, "returned nan for update 1; return a finite number"),
        (2, "returned -1 for update 2; return 0 or more"),
        (3, "returned '0.1' for update 3"),
    ],
)
def test_a_schedule_of_the_user_that_gives_no_rate_is_refused(schedule: str, made: int, words: str) -> None:
    config = OptimizerConfig(lr=1.0, lr_decay_style=f"{schedule}:wrong")
    with pytest.raises(SettingsError, match=words):
        learning_rate(config, made)
