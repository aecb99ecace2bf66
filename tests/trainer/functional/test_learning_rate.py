"""Tests the schedules of the learning rate, against Megatron-core's own."""

from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from trainer.config import OptimizerConfig
from trainer.functional.learning_rate import learning_rate


@pytest.mark.parametrize("style", get_args(get_type_hints(OptimizerConfig)["lr_decay_style"]))
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
