"""Tests the adaptive entropy bonus by hand."""

import pytest

from trainer.config import AlgorithmConfig
from trainer.functional.entropy_target import EntropyBonus

CONFIG = AlgorithmConfig(
    entropy_coef=0.001, entropy_target=0.2, entropy_coef_delta=0.001, entropy_coef_max=0.002
)


def test_the_first_step_has_the_bonus_of_the_settings() -> None:
    assert EntropyBonus.first(CONFIG).in_force == 0.001


def test_the_bonus_rises_below_the_target_and_is_off_above_it() -> None:
    bonus, found = EntropyBonus.first(CONFIG), []
    for entropy in (0.1, 0.1, 0.3, 0.3, 0.3, 0.1):
        bonus = bonus.after(entropy, CONFIG)
        found.append(bonus.in_force)
    assert found == pytest.approx([0.002, 0.002, 0.0, 0.0, 0.0, 0.001])


def test_a_step_without_trained_tokens_leaves_the_bonus() -> None:
    assert EntropyBonus(0.001, False).after(None, CONFIG) == EntropyBonus(0.001, False)
