"""Calls a user's algorithm and validates its return values. Errors name the user's file.

Shapes: N samples of the whole batch, k trained tokens of a micro-batch.
"""

import dataclasses
from typing import Any

import torch

from protocol.errors import SettingsError
from protocol.user_code import call, import_attribute, located
from trainer.algorithms.base import TokenLoss
from trainer.batch import TrainedTokens
from trainer.config import AlgorithmConfig

METHODS = ("advantages", "sample_weights", "token_loss")
"""Required methods of an `Algorithm`."""


class CheckedAlgorithm:
    """Wrapper that validates the shape, type and values of a user's algorithm at every call.

    The algorithm receives copies and may change them: rewards are reported, and counted per turn, afterwards.
    """

    def __init__(self, config: AlgorithmConfig, algorithm: Any, what: str) -> None:
        """Wrap the algorithm `algorithm`. `what` is the prefix of errors: setting, path and file."""
        self.config, self._algorithm, self._error_prefix = config, algorithm, what

    def advantages(self, rewards: torch.Tensor, group_index: torch.Tensor) -> torch.Tensor:
        """Return the user's advantages, float32 [N], all finite."""
        found = self._call("advantages", rewards.clone(), group_index.clone())
        return self._checked_values("advantages()", found, len(rewards))

    def sample_weights(self, sampled_tokens: torch.Tensor) -> torch.Tensor:
        """Return the user's weights, float32 [N], all finite."""
        found = self._call("sample_weights", sampled_tokens.clone())
        return self._checked_values("sample_weights()", found, len(sampled_tokens))

    def token_loss(
        self, tokens: TrainedTokens, logprobs: torch.Tensor, entropy: torch.Tensor | None = None
    ) -> TokenLoss:
        """Return the user's loss of each token.

        Values are not checked for being finite, because the check would wait for the GPU. A step whose
        gradient is not finite is skipped.
        """
        found = self._call("token_loss", tokens, logprobs, entropy)
        if not isinstance(found, TokenLoss):
            raise self._error(f"token_loss() returned {_described(found)}; return a TokenLoss")
        for field in dataclasses.fields(found):
            self._check(f"{field.name} of token_loss()", getattr(found, field.name), len(logprobs))
        if logprobs.requires_grad and len(logprobs) and not found.loss.requires_grad:
            raise self._error("loss of token_loss() has no gradient; compute it from the argument logprobs")
        return found

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the user's algorithm. Out-of-memory errors keep their type."""
        try:
            return getattr(self._algorithm, method)(*arguments)
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:  # the user's code may raise anything
            raise self._error(f"{method}() raised at {located(error)}") from error

    def _checked_values(self, description: str, value: Any, count: int) -> torch.Tensor:
        """Return the values as float32 [count]; raise for another shape or type, nan and infinities."""
        self._check(description, value, count)
        values: torch.Tensor = value.detach().float()
        wrong = (~torch.isfinite(values)).nonzero()[:, 0]
        if len(wrong):
            first = int(wrong[0])
            raise self._error(
                f"{description} has {float(values[first])} for sample {first}; return finite numbers"
            )
        return values

    def _check(self, description: str, value: Any, count: int) -> None:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.shape != (count,):
            raise self._error(f"{description} is {_described(value)}; return float32 of the shape [{count}]")

    def _error(self, text: str) -> SettingsError:
        return SettingsError(f"{self._error_prefix}: {text}")


def load_algorithm(config: AlgorithmConfig) -> CheckedAlgorithm:
    """Return the algorithm that `config.name`, a `MODULE:NAME`, refers to.

    Raises:
        SettingsError: the module or class is missing, either raises, the options do not fit, or a method is
            missing. The message names the file.
    """
    factory, file = import_attribute(config.name, "setting algorithm.name")
    what = f"setting algorithm.name: {config.name} in {file}"
    algorithm = call(
        what, factory, "the section [algorithm] and algorithm.options", (config,), config.options
    )
    for method in METHODS:
        if not callable(getattr(algorithm, method, None)):
            raise SettingsError(
                f"{what}: it has no {method}(); write it, or inherit it from an algorithm of "
                "trainer.algorithms"
            )
    return CheckedAlgorithm(config, algorithm, what)


def _described(value: Any) -> str:
    """Return the type and shape of a value as text."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__
