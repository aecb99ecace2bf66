"""Tests the adaptive entropy bonus by hand, and in checkpoints."""

import math
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from trainer.backends.base import StepStats
from trainer.config import AlgorithmConfig
from trainer.roles.entropy import FILE, EntropyBonus, EntropyControl
from trainer.storage.host_state import HostState

CONFIG = AlgorithmConfig(entropy_coef=0.001, entropy_target=0.2)
STEEP = AlgorithmConfig(
    entropy_coef=0.001, entropy_target=0.2, entropy_coef_delta=0.001, entropy_coef_max=0.002
)


def test_the_bonus_follows_the_mean_over_the_tokens_of_a_step() -> None:
    control = EntropyControl(CONFIG)
    control.note(
        [
            StepStats(trained_tokens=1, entropy=0.5),
            StepStats(trained_tokens=9, entropy=0.1),
            StepStats(trained_tokens=0, skipped="nothing to train"),
            StepStats(trained_tokens=9, skipped="the gradient's norm is nan", entropy=math.nan),
        ]
    )
    assert control.bonus == EntropyBonus(pytest.approx(0.0011), True)  # type: ignore[arg-type]
    before = control.bonus
    control.note([StepStats(trained_tokens=9, skipped="the gradient's norm is nan", entropy=math.nan)])
    assert control.bonus == before


def test_a_checkpoint_has_the_bonus(tmp_path: Path) -> None:
    control, other = EntropyControl(CONFIG), EntropyControl(CONFIG)
    control.note([StepStats(trained_tokens=1, entropy=0.123)])
    control.added_to(HostState({}, texts={"other": "kept"})).write(tmp_path)
    other.restore(tmp_path)
    assert other.bonus == control.bonus
    assert (tmp_path / "other").read_text() == "kept"


def test_a_checkpoint_without_it_starts_anew_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    control = EntropyControl(CONFIG)
    control.note([StepStats(trained_tokens=1, entropy=0.1)])
    control.restore(tmp_path)
    assert control.bonus == EntropyBonus.first(CONFIG)
    (tmp_path / FILE).write_text('{"coef": 1, "what": 2}')
    with pytest.raises(SettingsError, match=rf"{FILE} is damaged"):
        control.restore(tmp_path)


def test_the_first_step_has_the_bonus_of_the_settings() -> None:
    assert EntropyBonus.first(STEEP).in_force == 0.001


def test_the_bonus_rises_below_the_target_and_is_off_above_it() -> None:
    bonus, found = EntropyBonus.first(STEEP), []
    for entropy in (0.1, 0.1, 0.3, 0.3, 0.3, 0.1):
        bonus = bonus.after(entropy, STEEP)
        found.append(bonus.in_force)
    assert found == pytest.approx([0.002, 0.002, 0.0, 0.0, 0.0, 0.001])


def test_a_step_without_trained_tokens_leaves_the_bonus() -> None:
    assert EntropyBonus(0.001, False).after(None, STEEP) == EntropyBonus(0.001, False)
