"""Tests that a step which runs out of memory is repeated as if it had begun with the smaller budget."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.errors import SettingsError
from tests.trainer.fsdp.ranks import make_backend
from tests.trainer.megatron.models import make_batch, save_model
from trainer.fsdp.backend import FsdpBackend

NAME = "qwen2"
BUDGET = 1000
"""Tokens: more than the batch has."""
LIMIT = 40
"""Tokens that a pass can have; the longest sample has fewer."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(NAME, tmp_path_factory.mktemp("model"))


@pytest.fixture
def open_backend(model_dir: Path) -> Iterator[Callable[..., FsdpBackend]]:
    opened: list[FsdpBackend] = []

    def make(tokens: int = BUDGET, recompute: str = "") -> FsdpBackend:
        opened.append(make_backend(model_dir, recompute_granularity=recompute, micro_batch_tokens=tokens))
        return opened[-1]

    yield make
    for backend in opened:
        backend.close()


def limit_forward(backend: FsdpBackend, tokens: int) -> None:
    """In the second layer, when the first one's activations are kept."""

    def check(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        _check(inputs[0].size(1), tokens)

    module: Any = backend._model.module
    module.model.layers[1].register_forward_pre_hook(check)


def limit_backward(backend: FsdpBackend, tokens: int) -> None:
    """In the backward pass, when the second layer has added its gradients already."""

    def watch(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: _check(gradient.size(1), tokens))

    module: Any = backend._model.module
    module.model.layers[0].register_forward_hook(watch)


def _check(found: int, limit: int) -> None:
    if found > limit:
        raise torch.OutOfMemoryError(f"out of memory: a pass of {found} tokens. There are {limit}")


@pytest.mark.parametrize("limit", [limit_forward, limit_backward])
@pytest.mark.parametrize("recompute", ["", "full"])
def test_a_step_that_runs_out_of_memory_is_repeated_with_the_bits_of_the_smaller_budget(
    open_backend: Callable[..., FsdpBackend], limit: Callable[[FsdpBackend, int], None], recompute: str
) -> None:
    short, batch = open_backend(recompute=recompute), make_batch(NAME, 0)
    limit(short, LIMIT)
    repeated, tokens = short.train_step(batch), short._retry.tokens
    assert LIMIT / 2 < tokens <= LIMIT
    (warning,) = repeated.warnings
    assert f"out of memory with {BUDGET} tokens a micro-batch (out of memory: a pass of " in warning
    small = open_backend(tokens, recompute)
    plain = small.train_step(batch)
    assert plain.warnings == ()
    assert (repeated.loss, repeated.grad_norm) == (plain.loss, plain.grad_norm)
    expected = dict(small.export())
    assert all(torch.equal(expected[name], tensor) for name, tensor in short.export())
    assert short.train_step(make_batch(NAME, 1)).warnings == ()


def test_log_probabilities_are_computed_in_smaller_passes(open_backend: Callable[..., FsdpBackend]) -> None:
    backend, batch = open_backend(), make_batch(NAME, 0)
    expected = backend.logprobs(batch)
    limit_forward(backend, LIMIT)
    torch.testing.assert_close(backend.logprobs(batch), expected, atol=1e-6, rtol=0)
    assert backend._retry.tokens <= LIMIT


def test_one_sample_that_is_too_long_is_an_error_that_names_settings_and_changes_nothing(
    open_backend: Callable[..., FsdpBackend],
) -> None:
    backend = open_backend()
    before = {name: tensor.clone() for name, tensor in backend.export()}
    limit_forward(backend, 2)
    with pytest.raises(SettingsError, match=r"one sample a micro-batch .*granularity.*\[parallel\]"):
        backend.train_step(make_batch(NAME, 0))
    assert all(torch.equal(before[name], tensor) for name, tensor in backend.export())
