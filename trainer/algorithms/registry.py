"""Creates an algorithm by name, or a user's algorithm by `MODULE:NAME`.

    class Mine:                                                     or inherit from a built-in one
        def __init__(self, config: AlgorithmConfig, *, tau: float = 1.0): ...
        def advantages(self, rewards, group_index): ...                 [N], [N] -> [N]
        def sample_weights(self, sampled_tokens): ...                   [N] -> [N]
        def token_loss(self, tokens, logprobs, entropy=None): ...       k tokens, [k], [k] -> TokenLoss

`[algorithm] options` are the keyword arguments. docs/own_code.md describes the methods. The module of an
algorithm, and with it torch, is imported only when the algorithm is chosen.
"""

from dataclasses import dataclass

from protocol.choices import Entry, Registry, is_own, load
from protocol.errors import SettingsError
from trainer.algorithms.base import Algorithm
from trainer.config import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class AlgorithmEntry(Entry):
    """Import path of an algorithm's class, and traits of the algorithm. The class takes `AlgorithmConfig`."""

    group_relative: bool = False
    """Whether advantages compare the samples of a group with each other."""
    has_critic: bool = False
    """Whether advantages come from a critic, which is trained together with the policy."""
    on_data: bool = False
    """Whether it trains on tokens of the data set. No policy sampled the tokens, so there are no ratios."""
    whitened: bool = False
    """Whether advantages are whitened over the trained tokens of a batch."""


ALGORITHMS = Registry(
    {
        "cispo": AlgorithmEntry("trainer.algorithms.cispo:Cispo", group_relative=True),
        "dapo": AlgorithmEntry("trainer.algorithms.dapo:Dapo", group_relative=True),
        "dr_grpo": AlgorithmEntry("trainer.algorithms.dr_grpo:DrGrpo", group_relative=True),
        "grpo": AlgorithmEntry("trainer.algorithms.grpo:Grpo", group_relative=True),
        "gspo": AlgorithmEntry("trainer.algorithms.gspo:Gspo", group_relative=True),
        "m2po": AlgorithmEntry("trainer.algorithms.m2po:M2po", group_relative=True),
        "on_policy_distillation": AlgorithmEntry(
            "trainer.algorithms.on_policy_distillation:OnPolicyDistillation"
        ),
        "ppo": AlgorithmEntry("trainer.algorithms.ppo:Ppo", has_critic=True),
        "reinforce_plus_plus": AlgorithmEntry(
            "trainer.algorithms.reinforce_plus_plus:ReinforcePlusPlus", whitened=True
        ),
        "reinforce_plus_plus_baseline": AlgorithmEntry(
            "trainer.algorithms.reinforce_plus_plus:ReinforcePlusPlusBaseline",
            group_relative=True,
            whitened=True,
        ),
        "rloo": AlgorithmEntry("trainer.algorithms.rloo:Rloo", group_relative=True),
        "sft": AlgorithmEntry("trainer.algorithms.sft:Sft", on_data=True),
    },
    own=AlgorithmEntry,
)
DISTILLATION = "on_policy_distillation"
"""Name of the algorithm with a teacher."""


def make_algorithm(config: AlgorithmConfig) -> Algorithm:
    """Return the algorithm that `config.name` refers to.

    Raises:
        SettingsError: no algorithm has this name, a coefficient is out of range, or the constructor of a
            user's algorithm fails.
    """
    entry = ALGORITHMS.find(config.name, "setting algorithm.name:")
    if is_own(config.name):
        return load("trainer.algorithms.own.checked:load_algorithm")(config)
    algorithm: Algorithm = load(entry.path)(config)
    return algorithm


def check_turn_scores(config: AlgorithmConfig, *, reward_model: str = "") -> None:
    """Check that the algorithm can train on scores of turns. Called if the verifier scores turns.

    Args:
        config: section `[algorithm]`.
        reward_model: path of the trainer's reward model; empty without a reward model.

    Raises:
        SettingsError: the KL penalty in the reward, or the reward model's score, is per sample. The message
            says which setting to change.
    """
    if reward_model:
        raise SettingsError(
            f"setting reward_model.path: {reward_model!r} scores whole samples, and a verifier scores turns: "
            "remove one of the two settings"
        )
    entry = ALGORITHMS[config.name]
    if config.use_kl_in_reward and not (entry.has_critic or entry.whitened):
        raise SettingsError(
            "setting algorithm.use_kl_in_reward: its penalty is of whole samples, and a verifier scores "
            f"turns: turn it off, so that the KL is in the loss, or use ppo instead of {config.name}"
        )
