"""Tests that an algorithm of the user is loaded and that all it returns is checked."""

from pathlib import Path

import pytest
import torch

from protocol.errors import SettingsError
from trainer.algorithms import AlgorithmConfig, make_algorithm
from trainer.step.probe import probe_synthetic

MODULE = """
from dataclasses import dataclass
import torch
from trainer.algorithms import TokenLoss
from trainer.algorithms.grpo import Grpo

@dataclass(frozen=True)
class Scaled(Grpo):
    factor: float = 1.0
    def advantages(self, rewards, group_index):
        return self.factor * super().advantages(rewards, group_index)

class Whole:
    def __init__(self, config, *, wrong=""):
        self.wrong = wrong
    def advantages(self, rewards, group_index):
        if self.wrong == "raises":
            return rewards / missing
        if self.wrong == "nan":
            return torch.where(rewards == rewards[2], torch.nan, rewards)
        return rewards[:-1] if self.wrong == "shape" else rewards
    def sample_weights(self, sampled_tokens):
        if self.wrong == "type":
            return sampled_tokens
        return torch.ones(len(sampled_tokens)) / sampled_tokens.sum()
    def token_loss(self, tokens, logprobs, entropy=None):
        loss = -tokens.advantages * logprobs
        if self.wrong == "tensor":
            return loss
        if self.wrong == "scalar":
            loss = loss.mean()
        if self.wrong == "detached":
            loss = loss.detach()
        if self.wrong == "gradient":
            loss = loss + 0 * (logprobs - logprobs).sqrt()
        none = torch.zeros_like(logprobs)
        return TokenLoss(loss, none + 1, none, none)

class InPlace(Whole):
    def advantages(self, rewards, group_index):
        return rewards.sub_(rewards.mean())
    def sample_weights(self, sampled_tokens):
        return 1 / sampled_tokens.clamp_(min=5).float()

class Half:
    def __init__(self, config): ...
    def advantages(self, rewards, group_index): ...
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_algorithms_of_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "own_algorithms_of_test"


def own(name: str, **options: object) -> AlgorithmConfig:
    return AlgorithmConfig(name=name, options=options)


def test_an_own_algorithm_replaces_a_part_of_a_built_in(module: str) -> None:
    config = own(f"{module}:Scaled", factor=3.0)
    mine, grpo = (probe_synthetic(make_algorithm(c), 4) for c in (config, AlgorithmConfig()))
    torch.testing.assert_close(mine.advantages, 3 * grpo.advantages)
    torch.testing.assert_close(mine.weights, grpo.weights)
    assert mine.loss != grpo.loss


def test_an_own_algorithm_may_change_what_it_is_given(module: str) -> None:
    algorithm = make_algorithm(own(f"{module}:InPlace"))
    rewards, tokens = torch.tensor([1.0, 3.0]), torch.tensor([1, 9])
    assert algorithm.advantages(rewards, torch.tensor([0, 0])).tolist() == [-1.0, 1.0]
    algorithm.sample_weights(tokens)
    assert (rewards.tolist(), tokens.tolist()) == ([1.0, 3.0], [1, 9])


def test_an_own_algorithm_of_all_parts_computes_its_loss(module: str) -> None:
    found = probe_synthetic(make_algorithm(own(f"{module}:Whole")), 4)
    assert found.groups == 3
    assert torch.isfinite(found.gradient).all()
    assert float(found.gradient.norm()) > 0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("raises", r"advantages\(\) raised at .*own_algorithms_of_test.py:18: NameError"),
        ("nan", r"advantages\(\) has nan for sample 2; return finite numbers"),
        ("shape", r"advantages\(\) is float32 \[11\]; return float32 of the shape \[12\]"),
        ("type", r"sample_weights\(\) is int64 \[12\]; return float32"),
        ("tensor", r"token_loss\(\) returned float32 \[\d+\]; return a TokenLoss"),
        ("scalar", r"loss of token_loss\(\) is float32 \[\]; return float32 of the shape \[\d+\]"),
        ("detached", r"loss of token_loss\(\) has no gradient"),
        ("gradient", r"gradient of token_loss\(\) is nan at trained token 0 \(log-probability "),
    ],
)
def test_a_wrong_result_of_an_own_algorithm_is_refused(module: str, wrong: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words) as error:
        probe_synthetic(make_algorithm(own(f"{module}:Whole", wrong=wrong)), 4)
    assert f"{module}:Whole" in str(error.value)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("Whole", {"tau": 1}, "unexpected keyword argument 'tau'; it is called with the section"),
        ("Half", {}, r"has no sample_weights\(\); write it, or inherit it"),
        ("Wole", {}, "has no 'Wole'; did you mean 'Whole'"),
    ],
)
def test_an_own_algorithm_that_cannot_be_made_is_refused(
    module: str, name: str, options: dict[str, object], words: str
) -> None:
    with pytest.raises(SettingsError, match=words):
        make_algorithm(own(f"{module}:{name}", **options))


def test_too_little_memory_stays_an_error_of_its_own(module: str) -> None:
    made = make_algorithm(own(f"{module}:Whole"))

    def raises(*_: object) -> None:
        raise torch.OutOfMemoryError

    made._algorithm.advantages = raises  # type: ignore[attr-defined]
    with pytest.raises(torch.OutOfMemoryError):
        made.advantages(torch.zeros(2), torch.zeros(2))
