"""Tests what a step measures against numpy over Hugging Face log-probabilities, in both backends."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.trainer.groups import GroupSpec, SampleSpec, batch_of, scored
from tests.trainer.measured import expected, flat
from trainer.algorithms import AlgorithmConfig, make_algorithm
from trainer.algorithms.base import TokenLoss
from trainer.algorithms.registry import ALGORITHMS
from trainer.backends.base import Backend
from trainer.batch import Batch, trained_tokens
from trainer.config import OptimizerConfig, ParallelConfig, TrainerConfig
from trainer.registry import make_backend
from trainer.step.loss import micro_batch_loss
from trainer.step.measures import StepMeasures
from trainer.step.plan import is_measured

STEP, BOUND, CAP = 4, 2, 1.1
ALGORITHM = make_algorithm(AlgorithmConfig(importance_cap=CAP, kl_coef=0.01, entropy_coef=0.01))
PASSES = ("micro_batches", "padding_share", "shared_share", "computed_tokens")
"""What backends say of their passes, each in its own way."""
TOLERANCE = {"rel": 2e-5, "abs": 2e-6}


def made_batch(seed: int = 0) -> Batch:
    """Four groups with tokens of lag 0, 1, 2 and over the bound, inserted tokens, and two late groups."""
    generator = torch.Generator().manual_seed(seed)
    groups = []
    for group in range(4):
        samples = []
        for length in (6, 3, 5):
            tokens = torch.randint(2, 16, (length,), generator=generator).tolist()
            logprobs = (-2.7 + 0.3 * torch.randn(length, generator=generator)).tolist()
            versions = sorted((STEP - (group + i) % 4) for i in range(length))
            mask = [int(i != 1) for i in range(length)]
            samples.append(SampleSpec(tokens, versions, float(length == 3), mask, logprobs))
        groups.append((scored(GroupSpec(group=group, prompt=[3, 4, 5], samples=samples)), BOUND))
    return batch_of(groups, step=STEP, algorithm=ALGORITHM, temperature=0.8)


@torch.no_grad()
def plain(
    model_dir: Path, batch: Batch, weights: dict[str, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies [t] by transformers, of the model or of other weights."""
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    model.load_state_dict(weights or model.state_dict())
    found = []
    for tokens in batch.tokens.long().split(batch.lengths.tolist()):
        table = (model(input_ids=tokens[None]).logits[0, :-1].double() / batch.temperature).log_softmax(-1)
        both = table.gather(-1, tokens[1:, None])[:, 0], -(table.exp() * table).sum(-1)
        found.append([torch.nn.functional.pad(values, (1, 0)) for values in both])
    logprobs, entropy = (torch.cat(values) for values in zip(*found, strict=True))
    return logprobs, entropy


@pytest.fixture(params=["reference", "megatron"])
def backend(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[Backend]:
    made = make_backend(
        model_dir,
        parallel=ParallelConfig(),
        optimizer=OptimizerConfig(lr=1e-3),
        trainer=TrainerConfig(backend=request.param, micro_batch_size=5, device="cpu"),
        algorithm=ALGORITHM,
    )
    yield made
    made.close()


def test_measures_equal_numpy_over_hugging_face_logprobs(backend: Backend, model_dir: Path) -> None:
    backend.keep_reference()
    backend.train_step(made_batch(1))  # so that the model is another one than its reference
    first = plain(model_dir, made_batch())[0]
    for recomputed in (False, True):
        batch = replace(made_batch(), measured=torch.arange(12) < 7)
        batch = replace(batch, reference_logprobs=backend.reference_logprobs(batch))
        torch.testing.assert_close(
            batch.reference_logprobs, (first * batch.sampled_mask).float(), atol=1e-5, rtol=0
        )
        batch = replace(batch, decoupled=recomputed)
        before = {name: tensor.clone() for name, tensor in backend.export()}
        stats = flat(backend.train_step(batch))
        logprobs, entropy = plain(model_dir, batch, before)
        wanted = expected(batch, logprobs, entropy, cap=CAP)
        apart = {name: stats.pop(name, None) for name in ("skipped", "loss", "grad_norm", *PASSES)}
        assert apart["skipped"] == ""
        assert stats.keys() == wanted.keys()
        assert stats == pytest.approx(wanted, **TOLERANCE)
        assert {name for name in stats if name.endswith("tokens")} == {
            "trained_tokens", "mismatch.0.tokens", "mismatch.1.tokens", "mismatch.2.tokens",
        }  # fmt: skip
        assert stats["importance_ess"] < 0.99
        if recomputed:  # the loss's own ratio says nothing: its old policy is the present one
            assert (stats["ratio_mean"], stats["clip_fraction"]) == (pytest.approx(1, abs=1e-6), 0)
            assert stats["behaviour_clip_fraction"] > 0.1
            assert 0 < stats["importance_capped"] < 1
        else:
            assert stats["ratio_mean"] == pytest.approx(stats["importance_mean"])
            assert "importance_capped" not in stats


def test_a_step_without_trained_tokens_has_measured_nothing(backend: Backend) -> None:
    late = batch_of(
        [(scored(GroupSpec(samples=[SampleSpec([5], [0], 1.0), SampleSpec([6], [0])])), 0)],
        step=5,
        algorithm=ALGORITHM,
    )
    stats = flat(backend.train_step(late))
    assert "within the bound" in stats.pop("skipped")
    assert stats["trained_tokens"] == 0
    assert stats.keys() - {"trained_tokens", *PASSES} == set()


def test_a_batch_without_fresh_tokens_has_no_mismatch_at_lag_0(backend: Backend) -> None:
    batch = made_batch()
    batch = replace(batch, step=STEP + 1, totals=replace(batch.totals, lag_max=3, fresh=False))
    stats = backend.train_step(batch)
    assert set(stats.mismatch) == {1, 2, 3}
    assert (stats.logprob_error_max, stats.mismatch_mean, stats.token_mult_prob_error) == (None, None, None)


@pytest.mark.parametrize("name", sorted({*ALGORITHMS} - {"sft"}))
def test_predicted_clipping_equals_actual_clipping_where_nothing_is_recomputed(name: str) -> None:
    config = AlgorithmConfig(name=name, clip_low=0.05, clip_high=0.05)
    batch = replace(made_batch(), log_ratio_limit=0.1)
    tokens = trained_tokens(batch)
    noise = torch.randn(len(tokens.lags), generator=torch.Generator().manual_seed(1))
    logprobs = tokens.behaviour_logprobs + 0.2 * noise
    found = {}
    for decoupled in (False, True):
        given = replace(tokens, decoupled=decoupled)
        measures = StepMeasures.of_batch(batch, config)
        vector = micro_batch_loss(make_algorithm(config), measures, given, logprobs, logprobs)[1]
        found[decoupled] = measures.stats(vector, grad_norm=0.0, skipped="")
    assert found[False].clip_fraction == found[False].behaviour_clip_fraction
    assert 0 < found[False].behaviour_clip_fraction < 1
    assert found[True].behaviour_clip_fraction == found[False].behaviour_clip_fraction
    assert found[True].clip_fraction == 0


def test_micro_batches_are_joined_by_sums_and_maxima() -> None:
    batch = made_batch()
    measures = StepMeasures.of_batch(batch, ALGORITHM.config)

    def measured(samples: range) -> torch.Tensor:
        part = batch.select(torch.tensor(samples))
        tokens = trained_tokens(part)
        entropy = (part.tokens[tokens.place] * 0.37) % 1
        logprobs = tokens.behaviour_logprobs - 0.1 * part.tokens[tokens.place]
        terms = TokenLoss(entropy, entropy, entropy, entropy)
        return measures.measure(tokens, entropy.sum(), terms, logprobs, entropy)

    whole = measures.join([measured(range(12))], torch.device("cpu"))
    parts = measures.join([measured(range(i, min(i + 5, 12))) for i in range(0, 12, 5)], torch.device("cpu"))
    torch.testing.assert_close(whole, parts)


def test_measured_groups_are_a_share_that_does_not_change() -> None:
    chosen = {share: {g for g in range(2000) if is_measured(g, share)} for share in (0.0, 0.1, 0.5, 1.0)}
    assert (len(chosen[0.0]), len(chosen[1.0])) == (0, 2000)
    assert 120 < len(chosen[0.1]) < 280
    assert chosen[0.1] < chosen[0.5]
    assert 3 in chosen[1.0]
