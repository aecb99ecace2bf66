"""Makes an algorithm by name. Its module, and with it torch, is imported when it is chosen."""

import pkgutil

from protocol.choices import checked_name
from protocol.errors import SettingsError
from protocol.ranges import check_ranges
from trainer.algorithms.base import Algorithm
from trainer.config import AlgorithmConfig

ALGORITHMS = {
    "cispo": "trainer.algorithms.cispo:Cispo",
    "dapo": "trainer.algorithms.dapo:Dapo",
    "dr_grpo": "trainer.algorithms.dr_grpo:DrGrpo",
    "grpo": "trainer.algorithms.grpo:Grpo",
    "gspo": "trainer.algorithms.gspo:Gspo",
    "m2po": "trainer.algorithms.m2po:M2po",
    "on_policy_distillation": "trainer.algorithms.on_policy_distillation:OnPolicyDistillation",
    "ppo": "trainer.algorithms.ppo:Ppo",
    "reinforce_plus_plus": "trainer.algorithms.reinforce_plus_plus:ReinforcePlusPlus",
    "reinforce_plus_plus_baseline": "trainer.algorithms.reinforce_plus_plus:ReinforcePlusPlusBaseline",
    "rloo": "trainer.algorithms.rloo:Rloo",
    "sft": "trainer.algorithms.sft:Sft",
}
"""Algorithm -> its class, which takes an `AlgorithmConfig`."""
CRITIC = frozenset({"ppo"})
"""Algorithms whose advantages are a critic's, which is trained together with the policy."""
GROUP_RELATIVE = frozenset(ALGORITHMS) - {"on_policy_distillation", "reinforce_plus_plus", "sft"} - CRITIC
"""Algorithms whose advantages compare the samples of a group with each other."""
WHITENED = frozenset({"reinforce_plus_plus", "reinforce_plus_plus_baseline"})
"""Algorithms whose advantages are whitened over the trained tokens of a batch."""
DISTILLATION = "on_policy_distillation"
"""The algorithm with a teacher."""
ON_DATA = frozenset({"sft"})
"""Algorithms that train on tokens that no policy sampled: there is no policy to compare with."""


def make_algorithm(config: AlgorithmConfig) -> Algorithm:
    """Return the algorithm that `config` names.

    Raises:
        SettingsError: no algorithm has that name, or a coefficient is out of its range.
    """
    path = ALGORITHMS[checked_name(config.name, ALGORITHMS, "setting algorithm.name:")]
    check_ranges(config, "algorithm")
    algorithm: Algorithm = pkgutil.resolve_name(path)(config)
    return algorithm


def check_turn_scores(config: AlgorithmConfig) -> None:
    """Check that scores of turns can be trained on; called where a verifier gives them.

    Raises:
        SettingsError: the penalty in the reward is one of whole samples; says what to change.
    """
    if config.use_kl_in_reward and config.name not in CRITIC | WHITENED:
        raise SettingsError(
            "setting algorithm.use_kl_in_reward: its penalty is of whole samples, and a verifier scores "
            f"turns: turn it off, so that the KL is in the loss, or use ppo instead of {config.name}"
        )
