"""A step that runs out of memory is repeated as if it had begun with the smaller budget, by both backends."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.errors import SettingsError
from tests.changes import slow_unless_changed
from tests.trainer.fsdp import ranks as fsdp
from tests.trainer.megatron.memory import memory_ranks as megatron
from tests.trainer.megatron.models import OPTIMIZER, make_batch, save_model
from tests.trainer.megatron.ranks import ALGORITHM
from trainer.config import ParallelConfig, TrainerConfig
from trainer.fsdp.backend import FsdpBackend
from trainer.megatron.backend import MegatronBackend

pytestmark = slow_unless_changed("trainer/memory/", "trainer/fsdp/", "trainer/megatron/", "trainer/backends/")

NAME = "qwen2"
BUDGET = 1000
"""Tokens: more than the batch has."""
LIMIT = 40
"""Tokens that a pass can have; the longest sample has fewer."""


class Megatron:
    """The backend of Megatron-core."""

    recompute = "selective"
    limits = (megatron.limit_forward, megatron.limit_backward)

    @staticmethod
    def make(model_dir: Path, **trainer: Any) -> MegatronBackend:
        return MegatronBackend(
            model_dir,
            parallel=ParallelConfig(),
            optimizer=OPTIMIZER,
            trainer=TrainerConfig(device="cpu", **trainer),
            algorithm=ALGORITHM,
        )

    @staticmethod
    def tokens(backend: MegatronBackend) -> int:
        return backend._passes.tokens


class Fsdp:
    """The backend of transformers and FSDP."""

    recompute = "full"
    limits = (fsdp.limit_forward, fsdp.limit_backward)

    @staticmethod
    def make(model_dir: Path, **trainer: Any) -> FsdpBackend:
        return fsdp.make_backend(model_dir, **trainer)

    @staticmethod
    def tokens(backend: FsdpBackend) -> int:
        return backend._retry.tokens


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(NAME, tmp_path_factory.mktemp("model"))


@pytest.fixture(params=[Megatron, Fsdp])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def open_backend(kind: Any, model_dir: Path) -> Iterator[Callable[..., Any]]:
    opened: list[Any] = []

    def make(**trainer: Any) -> Any:
        opened.append(kind.make(model_dir, **{"micro_batch_tokens": BUDGET, **trainer}))
        return opened[-1]

    yield make
    for backend in opened:
        backend.close()


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("recomputes", [False, True])
def test_a_step_that_runs_out_of_memory_is_repeated_with_the_bits_of_the_smaller_budget(
    kind: Any,
    open_backend: Callable[..., Any],
    place: str,
    recomputes: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    recompute = kind.recompute if recomputes else ""
    short, batch = open_backend(recompute_granularity=recompute), make_batch(NAME, 0)
    kind.limits[place == "backward"](short, LIMIT)
    repeated, tokens = short.train_step(batch), kind.tokens(short)
    assert LIMIT / 2 < tokens <= LIMIT
    (warning,) = repeated.warnings
    assert f"out of memory with {BUDGET} tokens per micro-batch (out of memory: a pass of " in warning
    assert f"repeated with {tokens}" in warning
    assert f"memory.out tokens={BUDGET} next=" in caplog.text
    small = open_backend(micro_batch_tokens=tokens, recompute_granularity=recompute)
    plain = small.train_step(batch)
    assert plain.warnings == ()
    assert (repeated.loss, repeated.grad_norm) == (plain.loss, plain.grad_norm)
    expected = dict(small.export())
    assert all(torch.equal(expected[name], tensor) for name, tensor in short.export())
    assert short.train_step(make_batch(NAME, 1)).warnings == ()


def test_log_probabilities_are_computed_in_smaller_passes(
    kind: Any, open_backend: Callable[..., Any]
) -> None:
    backend, batch = open_backend(), make_batch(NAME, 0)
    expected = backend.logprobs(batch)
    kind.limits[0](backend, LIMIT)
    torch.testing.assert_close(backend.logprobs(batch), expected, atol=1e-6, rtol=0)
    assert kind.tokens(backend) <= LIMIT
    assert [warning.split(" (")[0] for warning in backend.train_step(batch).warnings] == [
        f"out of memory with {BUDGET} tokens per micro-batch"
    ]


def test_one_sample_that_is_too_long_is_an_error_that_names_settings_and_changes_nothing(
    kind: Any, open_backend: Callable[..., Any]
) -> None:
    backend = open_backend()
    before = {name: tensor.clone() for name, tensor in backend.export()}
    kind.limits[0](backend, 2)
    with pytest.raises(
        SettingsError, match=r"one sample per micro-batch .*recompute_granularity.*\[parallel\]"
    ):
        backend.train_step(make_batch(NAME, 0))
    assert all(torch.equal(before[name], tensor) for name, tensor in backend.export())


@pytest.mark.parametrize("kind", [Fsdp], indirect=True)
def test_states_for_a_head_leave_the_budget_of_steps_as_it_is(
    kind: Any, open_backend: Callable[..., Any]
) -> None:
    backend, batch = open_backend(), make_batch(NAME, 0)
    fsdp.limit_forward(backend, LIMIT)
    with pytest.raises(torch.OutOfMemoryError):
        backend.last_states(batch)
    assert Fsdp.tokens(backend) == BUDGET
    one = batch.select(torch.tensor([0]))
    expected = open_backend().last_states(one).states[1:]
    assert torch.equal(backend.last_states(one).states[1:], expected)
