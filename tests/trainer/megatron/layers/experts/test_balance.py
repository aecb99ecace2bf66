"""Tests the losses that spread tokens over experts against numbers worked out by hand."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from protocol.errors import SettingsError
from tests.trainer.megatron.models import BALANCE, OPTIMIZER, make_batch, save_model
from tests.trainer.megatron.plain import PlainTrainer
from tests.trainer.megatron.ranks import ALGORITHM
from trainer.batch import Batch
from trainer.config import ParallelConfig, TrainerConfig
from trainer.megatron.backend import MegatronBackend
from trainer.megatron.families.experts import Experts
from trainer.megatron.layers.experts.balance import (
    auxiliary_loss,
    extremes,
    loads_by_layer,
    routed_tokens,
    set_balance,
    tokens_by_sample,
    updated_bias,
    z_loss,
)

MODEL = "qwen3-moe"
CHOSEN = torch.tensor([[0, 1], [0, 2], [1, 0], [2, 2]])
"""Two samples of two tokens and one, and one token of padding."""
PLACES = torch.tensor([0, 0, 1]), torch.tensor([0, 1, 2])
"""Row of each token, and which token that is."""
TOKENS = routed_tokens([2, 1], *PLACES, 4, samples=4)
SCORES = torch.tensor([[0.5, 0.25, 0.25], [0.75, 0.125, 0.125], [0.25, 0.5, 0.25], [0.0, 0.0, 1.0]])


def test_tokens_by_sample_leaves_padding_out() -> None:
    assert tokens_by_sample(CHOSEN, 3, TOKENS).tolist() == [[2, 1, 1], [1, 1, 0]]


def test_the_auxiliary_loss_is_the_mean_over_the_samples_of_the_step() -> None:
    counts = tokens_by_sample(CHOSEN, 3, TOKENS)
    first = 3 * (2 / 4 * 0.625 + 1 / 4 * 0.1875 + 1 / 4 * 0.1875)
    second = 3 * (1 / 2 * 0.25 + 1 / 2 * 0.5)
    found = auxiliary_loss(SCORES, counts, TOKENS, 2, None)
    assert float(found) == pytest.approx((first + second) / 4)


def test_the_losses_of_parts_add_up_to_that_of_the_whole() -> None:
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    halves = [routed_tokens([2, 1], *PLACES, 4, samples=4, part=part, parts=2) for part in range(2)]
    parts = [z_loss(logits[2 * part : 2 * part + 2], half) for part, half in enumerate(halves)]
    by_hand = logits.logsumexp(-1).square() * torch.tensor([1 / 8, 1 / 8, 1 / 4, 0])
    assert float(sum(parts)) == pytest.approx(float(by_hand.sum()))
    assert [(half.rows.tolist(), half.places.tolist()) for half in halves] == [([0, 0], [0, 1]), ([1], [0])]


def branched(copies: int) -> Batch:
    """Two samples without an advantage, the first of which has so many equal rows, and one more."""
    batch = make_batch(MODEL, samples=3)
    batch = batch.select(torch.tensor([0] * copies + [1, 2]))
    rows, weights = torch.tensor([5] * (copies + 1) + [7]), torch.zeros_like(batch.weights)
    inputs = (batch.lengths - 1).float()
    shares = inputs / torch.cat([inputs[:-1].sum().expand(copies + 1), inputs[-1:]])
    totals = replace(batch.totals, samples=2)
    return replace(batch, rows=rows, shares=shares, weights=weights, totals=totals)


@pytest.mark.parametrize("trainer", [{}, {"micro_batch_size": 1}], ids=["together", "apart"])
def test_a_sample_counts_once_however_many_rows_it_has(tmp_path: Path, trainer: dict[str, int]) -> None:
    directory = save_model(MODEL, tmp_path)
    for copies in (1, 3):
        settings = TrainerConfig(device="cpu", **BALANCE[MODEL], **trainer)
        backend = MegatronBackend(
            directory, parallel=ParallelConfig(), optimizer=OPTIMIZER, trainer=settings, algorithm=ALGORITHM
        )
        stats = backend.train_step(branched(copies))
        backend.close()
        plain = PlainTrainer(MODEL, ALGORITHM).step(branched(copies))
        assert stats.grad_norm == pytest.approx(plain["grad_norm"], rel=1e-5)
    # equal rows alone change nothing
    one, two = (
        routed_tokens([2] * k, *torch.zeros(2, 1).long(), 1, 4, shares=torch.ones(k) / k) for k in (1, 2)
    )
    assert (one.weights.tolist(), two.weights.tolist()) == ([1 / 8], [1 / 16, 1 / 16])


def test_a_token_of_two_rows_counts_as_two() -> None:
    twice = routed_tokens([2, 1], torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0]), 2, samples=4)
    apart = routed_tokens([2, 1], torch.tensor([0, 0, 1]), torch.tensor([0, 1, 2]), 3, samples=4)
    again = torch.tensor([0, 1, 0])
    logits = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    counts = tokens_by_sample(CHOSEN[:2], 3, twice)
    assert torch.equal(counts, tokens_by_sample(CHOSEN[again], 3, apart))
    torch.testing.assert_close(z_loss(logits, twice), z_loss(logits[again], apart))
    found = auxiliary_loss(SCORES[:2], counts, twice, 2, None)
    torch.testing.assert_close(found, auxiliary_loss(SCORES[again], counts, apart, 2, None))


def test_biases_move_towards_an_even_spread() -> None:
    bias = updated_bias(torch.tensor([0.0, 0.5, 0.0]), torch.tensor([3.0, 1.0, 2.0]), 0.25)
    assert bias.tolist() == [-0.25, 0.75, 0.0]


def test_extremes_are_relative_to_an_even_spread_and_of_layers_with_experts() -> None:
    loads = loads_by_layer([(1, torch.tensor([1.0, 3.0])), (2, torch.tensor([2.0, 2.0]))], 3, 2)
    assert extremes(loads) == (1.5, 0.5)
    assert extremes(loads[:1]) == extremes(loads_by_layer([], 2, 0)) == (None, None)


def test_biases_that_a_checkpoint_does_not_hold_are_refused() -> None:
    with pytest.raises(
        SettingsError, match=r"moe_router_bias_update_rate: 0\.001 is for models whose routers"
    ):
        set_balance(None, Experts(count=4), TrainerConfig(moe_router_bias_update_rate=1e-3))
