"""Tests the random samples, and Hugging Face's log-probabilities of them."""

from pathlib import Path

import pytest
import torch

from protocol.errors import SettingsError
from tests.trainer.megatron.models import make_model, plain_logprobs, save_model
from trainer.model_check.expected import hf_logprobs, random_samples


def test_random_samples_fit_the_model() -> None:
    batch = random_samples(vocabulary=7, positions=5)
    assert int(batch.tokens.max()) < 7
    assert int(batch.lengths.max()) == 5
    assert int(batch.lengths.min()) >= 2
    assert int(batch.sampled_mask.sum()) == len(batch.tokens) - len(batch.lengths)
    assert torch.equal(batch.tokens, random_samples(vocabulary=7, positions=5).tokens)


def test_hf_logprobs_are_those_of_the_models_logits(tmp_path: Path) -> None:
    batch = random_samples(vocabulary=131, positions=20)
    with torch.no_grad():
        expected, _ = plain_logprobs(make_model("qwen2"), batch)
    torch.testing.assert_close(hf_logprobs(save_model("qwen2", tmp_path), batch), expected)


def test_hf_logprobs_refuse_what_transformers_cannot_load(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(SettingsError, match="transformers cannot load it"):
        hf_logprobs(tmp_path, random_samples(7, 5))
