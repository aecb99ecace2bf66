"""Tests recomputed log-probabilities against a pass for each prefix, and their e-values by expectation."""

import dataclasses
import logging
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from protocol.errors import SettingsError
from protocol.rollout_view import RowView
from rollout.engines.contract.models import tiny_model
from services.audit import recompute
from services.audit.auditor import Auditor
from services.audit.recompute import Recomputer
from services.audit.records import Expectations
from tests.changes import slow_unless_changed

PROMPT = np.array([5, 17, 20], dtype=np.int32)


def row_of(tokens: list[int]) -> RowView:
    """A row whose tokens were all sampled under version 0."""
    own = np.array(tokens, dtype=np.int32)
    return RowView(
        sample=0,
        context=np.array([7], dtype=np.int32),
        tokens=own,
        logprobs=np.zeros(len(own), dtype=np.float32),
        sampled=np.ones(len(own), dtype=bool),
        versions=np.zeros(len(own), dtype=np.int32),
        finish_reason="length",
        response="",
        environment_reward=None,
    )


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny_model(0).save_pretrained(directory)
    return directory


@torch.no_grad()
def test_scores_are_the_log_probabilities_of_each_prefix_under_the_version(model_dir: Path) -> None:
    other, tokens = tiny_model(3), [40, 2, 2, 511, 9]
    recomputer = Recomputer(model_dir)
    recomputer.serve(dict(other.state_dict()))
    found = recomputer.score(PROMPT, row_of(tokens), 0.7)
    before = [*PROMPT.tolist(), 7]
    for place, token in enumerate(tokens):
        logits = other(torch.tensor([[*before, *tokens[:place]]])).logits[0, -1].double() / 0.7
        assert found.logprobs[place] == pytest.approx(float(logits.log_softmax(-1)[token]), abs=1e-5)


@slow_unless_changed("services/audit/", "tests/services/audit/")
def test_e_values_of_other_temperatures_have_expectation_one(model_dir: Path) -> None:
    recomputer = Recomputer(model_dir)
    scores = [recomputer.score(PROMPT, row_of([token]), 1.0) for token in range(512)]
    chances = np.exp([score.logprobs[0] for score in scores])
    ratios = np.exp([score.tempered[0] for score in scores])
    assert chances.sum() == pytest.approx(1)
    assert (chances[:, None] * ratios).sum(0) == pytest.approx(np.ones(ratios.shape[1]))


def test_version_that_lacks_a_tensor_is_refused_and_changes_nothing(model_dir: Path) -> None:
    recomputer = Recomputer(model_dir)
    before = recomputer.score(PROMPT, row_of([1, 2]), 1.0).logprobs
    tensors = dict(tiny_model(3).state_dict())
    del tensors["model.norm.weight"]
    with pytest.raises(SettingsError, match=r"model\.norm\.weight"):
        recomputer.serve(tensors)
    assert (recomputer.score(PROMPT, row_of([1, 2]), 1.0).logprobs == before).all()


def test_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="transformers cannot load it"):
        Recomputer(tmp_path)


def test_half_precision_is_another_model_by_rounding_alone(model_dir: Path) -> None:
    single = AutoModelForCausalLM.from_pretrained(model_dir).state_dict()
    pair = [Recomputer(model_dir, dtype) for dtype in (torch.float32, torch.float64)]
    for recomputer in pair:
        recomputer.serve(single)
    first, second = (recomputer.score(PROMPT, row_of([4, 5, 6]), 1.0).logprobs for recomputer in pair)
    assert 0 < np.abs(first - second).max() < 1e-4


@torch.no_grad()
def test_scores_do_not_depend_on_the_chunks(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recomputer, row = Recomputer(model_dir), row_of([40, 2, 2, 511, 9, 3, 3])
    whole = recomputer.score(PROMPT, row, 0.7)
    bare = dataclasses.replace(row, context=PROMPT[:0])
    first = recomputer.score(PROMPT[:0], bare, 0.7)
    monkeypatch.setattr(recompute, "CHUNK", 3)
    found = recomputer.score(PROMPT, row, 0.7)
    assert found.logprobs == pytest.approx(whole.logprobs, abs=1e-5)
    assert found.tempered == pytest.approx(whole.tempered, abs=1e-5)
    assert first.logprobs[0] == 0
    again = recomputer.score(PROMPT[:0], bare, 0.7)
    assert again.logprobs == pytest.approx(first.logprobs, abs=1e-5)


def test_row_whose_pass_takes_too_much_memory_is_left_out_counted_and_logged_once(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tables = recompute.CHUNK * 512 * 8 * recompute.FLOAT64_TABLES
    model = Recomputer(model_dir, max_row_bytes=tables + 2 * 4 * 8 * 8 * 4)  # 4 heads, 8 tokens
    group = SimpleNamespace(
        plan=SimpleNamespace(temperature=1.0),
        view=SimpleNamespace(group=7, prompt=PROMPT, rows=[row_of([1] * n) for n in (4, 5, 6)]),
    )
    auditor, added = (
        Auditor((model, model), share=1.0, dtype="float32", expectations=Expectations()),
        list[set[int]](),
    )
    auditor.residuals.add = lambda step, group, version, scores: added.append({*scores})  # type: ignore[method-assign]
    version = dict(tiny_model(3).state_dict())
    with caplog.at_level(logging.WARNING, "tether.audit"):
        auditor._recompute(0, [group], {0: version})  # type: ignore[list-item]
    assert (added, auditor.rows_left_out, len(caplog.records)) == ([{0}], 2, 1)
    assert auditor.row_s > 0
    auditor._stopped = lambda: True
    auditor._recompute(0, [group], {0: version})  # type: ignore[list-item]
    assert len(added) == 1
    auditor._stopped = iter([False, False, True]).__next__
    auditor._recompute(0, [group], {0: version})  # type: ignore[list-item]
    assert added == [{0}, {0}]  # what was computed before the end counts


def test_row_whose_pass_takes_too_many_operations_does_not_fit(model_dir: Path) -> None:
    each = 2 * sum(parameter.numel() for parameter in tiny_model(0).parameters())
    model, seven, eight = Recomputer(model_dir, operations=7 * each), row_of([1, 2, 3]), row_of([1, 2, 3, 4])
    assert (model.fits(PROMPT, seven), model.fits(PROMPT, eight)) == (True, False)
