"""Tests what a step measures against numpy over Hugging Face log-probabilities, in both backends."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.trainer.groups import GroupSpec, SampleSpec, scored
from tests.trainer.measured import expected, flat
from trainer.algorithms import AlgorithmConfig, make_algorithm
from trainer.algorithms.base import TokenLoss
from trainer.backends.base import Backend
from trainer.backends.step import is_measured
from trainer.backends.step_measures import StepMeasures
from trainer.batch import Batch
from trainer.config import OptimizerConfig, ParallelConfig, TrainerConfig
from trainer.data.batch_builder import build_batch
from trainer.registry import make_backend

STEP, BOUND, CAP = 4, 2, 1.1
ALGORITHM = make_algorithm(AlgorithmConfig(importance_cap=CAP, kl_coef=0.01, entropy_coef=0.01))
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
    return build_batch(groups, step=STEP, algorithm=ALGORITHM, temperature=0.8, mask_late=True).batch


@torch.no_grad()
def plain(
    model_dir: Path, batch: Batch, weights: dict[str, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies [N, L] by transformers, of the model or of other weights."""
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    model.load_state_dict(weights or model.state_dict())
    table = (model(input_ids=batch.tokens).logits[:, :-1].double() / batch.temperature).log_softmax(-1)
    chosen = table.gather(-1, batch.tokens[:, 1:, None])[..., 0]
    pad = torch.nn.functional.pad
    return pad(chosen, (1, 0)), pad(-(table.exp() * table).sum(-1), (1, 0))


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
        if recomputed:
            batch = replace(batch, proximal_logprobs=backend.logprobs(batch))
        before = {name: tensor.clone() for name, tensor in backend.export()}
        stats = flat(backend.train_step(batch))
        logprobs, entropy = plain(model_dir, batch, before)
        wanted = expected(batch, logprobs, entropy, cap=CAP)
        assert {name: stats.pop(name) for name in ("skipped", "loss", "grad_norm")}["skipped"] == ""
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
    late = build_batch(
        [(scored(GroupSpec(samples=[SampleSpec([5], [0], 1.0), SampleSpec([6], [0])])), 0)],
        step=5, algorithm=ALGORITHM, temperature=1.0, mask_late=True,
    ).batch  # fmt: skip
    stats = flat(backend.train_step(late))
    assert "within the bound" in stats.pop("skipped")
    assert stats == {"trained_tokens": 0}


def test_a_batch_without_fresh_tokens_has_no_mismatch_at_lag_0(backend: Backend) -> None:
    batch = made_batch()
    batch = replace(batch, step=STEP + 1)
    stats = backend.train_step(batch)
    assert set(stats.mismatch) == {1, 2, 3}
    assert (stats.logprob_error_max, stats.mismatch_mean, stats.token_mult_prob_error) == (None, None, None)


def test_micro_batches_are_joined_by_sums_and_maxima() -> None:
    batch = made_batch()
    logprobs, entropy = batch.behaviour_logprobs - 0.1 * batch.tokens, torch.rand(batch.tokens.shape)
    measures = StepMeasures.of_batch(batch, ALGORITHM.config)

    def measured(rows: slice) -> torch.Tensor:
        part = {
            name: getattr(batch, name)[rows]
            for name in ("tokens", "loss_mask", "behaviour_logprobs", "versions", "advantages")
        }
        terms = TokenLoss(loss=entropy[rows], ratio=entropy[rows], clipped=entropy[rows])
        piece = replace(batch, **part)
        return measures.measure(piece, entropy[rows].sum(), terms, logprobs[rows], entropy[rows])

    whole = measures.join([measured(slice(None))], torch.device("cpu"))
    parts = measures.join([measured(slice(i, i + 5)) for i in range(0, 12, 5)], torch.device("cpu"))
    torch.testing.assert_close(whole, parts)


def test_measured_groups_are_a_share_that_does_not_change() -> None:
    chosen = {share: {g for g in range(2000) if is_measured(g, share)} for share in (0.0, 0.1, 0.5, 1.0)}
    assert (len(chosen[0.0]), len(chosen[1.0])) == (0, 2000)
    assert 120 < len(chosen[0.1]) < 280
    assert chosen[0.1] < chosen[0.5]
    assert 3 in chosen[1.0]
