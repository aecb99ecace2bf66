"""Tests that rows are scored as transformers' sequence classifier scores them, and the use of scores."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from protocol.errors import RewardError
from protocol.messages import ScoredRollout
from protocol.tensors import Array
from tests.protocol.samples import BRANCHED
from tests.trainer.classifiers import save_classifier
from tests.trainer.megatron.models import make_batch, save_model
from tests.trainer.roles.test_advantages import OneReplica
from trainer.algorithms import make_algorithm
from trainer.backends.base import FrozenSpec
from trainer.batch import Batch
from trainer.config import AlgorithmConfig, TrainerConfig
from trainer.reference.backend import load_frozen
from trainer.roles.advantages import _scored
from trainer.roles.row_scores import lengthened, score_rows
from trainer.step.plan import plan_step

WEIGHT = 0.5


def branched() -> tuple[Batch, torch.Tensor]:
    """Two rows of a sample with reward 1, one of a sample with 0; and scores 1, 4 and -2 at their ends."""
    rollout = ScoredRollout(rollout=BRANCHED, rewards=Array.of([1.0, 0.0], "float32"))
    part = plan_step([(rollout, 2)], step=5, algorithm=make_algorithm(AlgorithmConfig())).part([0, 1, 2])
    scores = torch.zeros(len(part.tokens))
    scores[part.offsets[1:] - 1] = torch.tensor([1.0, 4.0, -2.0])
    return part, scores


@pytest.mark.parametrize("pad", [None, 3])
def test_scores_are_those_of_transformers(tmp_path: Path, pad: int | None) -> None:
    directory = save_classifier(save_model("qwen2", tmp_path), tmp_path / "classifier", pad=pad)
    spec = FrozenSpec("reward_model", directory, is_classifier=True)
    batch = make_batch("qwen2", 0)
    device = torch.device("cpu")
    found = load_frozen(spec, TrainerConfig(backend="reference", dtype="float32"), device).evaluate(batch)
    ends = batch.offsets[1:] - 1
    classifier = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    classifier.config.pad_token_id = None  # a padding token that a row ends with is its last one here
    with torch.no_grad():
        wanted = [
            classifier(batch.tokens[first:end].long()[None]).logits.item()
            for first, end in zip(batch.offsets.tolist(), batch.offsets[1:].tolist(), strict=False)
        ]
    torch.testing.assert_close(found[ends], torch.tensor(wanted), rtol=0, atol=1e-5)
    assert len(set(wanted)) == len(wanted)
    found[ends] = 0
    assert not found.any()


def test_the_added_token_alone_is_asked_for_and_none_is_trained() -> None:
    batch = make_batch("qwen2", 0)
    longer = lengthened(batch)
    assert torch.equal(longer.lengths, batch.lengths + 1)
    assert torch.equal(longer.tokens[~longer.sampled_mask], batch.tokens)
    assert longer.sampled_mask.nonzero()[:, 0].tolist() == (longer.offsets[1:] - 1).tolist()
    assert not longer.loss_mask.any()
    nothing = batch.select(torch.zeros(0, dtype=torch.int64))
    assert score_rows(lambda part: torch.zeros(len(part.tokens)), nothing).tolist() == []


def test_a_score_is_added_to_the_reward_and_is_the_mean_of_the_branches() -> None:
    part, scores = branched()
    algorithm = make_algorithm(AlgorithmConfig())
    scored, mean = _scored(part, OneReplica(), scores, algorithm, WEIGHT)  # type: ignore[arg-type]
    assert scored.rewards.tolist() == [1 + WEIGHT * 2.5, 1 + WEIGHT * 2.5, WEIGHT * -2]
    assert mean == 0.25
    wanted = algorithm.advantages(torch.tensor([2.25, -1.0]), torch.tensor([0, 0]))[scored.rows]
    torch.testing.assert_close(scored.advantages, wanted[scored.sample_index] * scored.loss_mask)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_score_that_is_not_finite_is_refused_by_name(value: float) -> None:
    part, scores = branched()
    scores[part.offsets[3] - 1] = value
    with pytest.raises(RewardError, match=rf"step 5: the score of sample 1 of the batch .* is {value}"):
        _scored(part, OneReplica(), scores, make_algorithm(AlgorithmConfig()), WEIGHT)  # type: ignore[arg-type]
