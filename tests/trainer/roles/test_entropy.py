"""Tests the entropy bonus in checkpoints."""

from pathlib import Path

import pytest

from protocol.errors import SettingsError
from trainer.backends.base import StepStats
from trainer.config import AlgorithmConfig
from trainer.functional.entropy_target import EntropyBonus
from trainer.roles.entropy import FILE, EntropyControl
from trainer.storage.host_state import HostState

CONFIG = AlgorithmConfig(entropy_coef=0.001, entropy_target=0.2)


def test_the_bonus_follows_the_mean_over_the_tokens_of_a_step() -> None:
    control = EntropyControl(CONFIG)
    control.note(
        [
            StepStats(trained_tokens=1, entropy=0.5),
            StepStats(trained_tokens=9, entropy=0.1),
            StepStats(trained_tokens=0, skipped="nothing to train"),
        ]
    )
    assert control.bonus == EntropyBonus(pytest.approx(0.0011), True)  # type: ignore[arg-type]


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
