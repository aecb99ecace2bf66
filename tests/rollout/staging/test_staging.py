"""Tests a staging copy: tied and untied models, and cancelled fetches."""

from pathlib import Path

import pytest
import torch

from protocol.errors import WeightError
from protocol.weights.draft_head import PREFIX
from rollout.engines.contract.models import tiny_model, weights, write_shm
from rollout.staging.staging import Staging, stored_once, whole_source
from tests.rollout.staging.models import OLD, staging


def test_tied_and_untied_models_refuse_each_others_versions(tmp_path: Path) -> None:
    tied, untied = tiny_model(1, tied=True), tiny_model(2)
    assert "lm_head.weight" not in stored_once(tied.named_parameters(remove_duplicate=False))
    manifest = write_shm(tmp_path / "tied", weights(tied), 1)
    sources = {name: whole_source(tensor) for name, tensor in weights(untied).items()}
    with pytest.raises(WeightError, match=r"lacks tensor lm_head\.weight"):
        Staging(sources).check(manifest)
    with pytest.raises(WeightError, match=r"no parameter for tensor lm_head.weight \(its embed"):
        Staging({name: whole_source(t) for name, t in weights(tied).items()}, tied=True).check(
            write_shm(tmp_path / "u", weights(untied), 1)
        )


def test_head_is_left_out_only_by_an_engine_without_one(tmp_path: Path) -> None:
    target = whole_source(torch.empty(4))
    version = {name: torch.ones(4) for name in ("a", f"{PREFIX}b", f"{PREFIX}c")}
    manifest = write_shm(tmp_path / "v1", version, 1)
    Staging({"a": target}).check(manifest)
    with pytest.raises(WeightError, match=rf"no parameter for tensor {PREFIX}c"):
        Staging({"a": target, f"{PREFIX}b": target}).check(manifest)


def test_cancel_before_a_fetch_ends_that_fetch_alone(tmp_path: Path) -> None:
    copy = staging()
    manifest = write_shm(tmp_path / "v1", OLD, 1)
    copy.cancel()
    with pytest.raises(WeightError, match="cancelled"):
        copy.fetch(manifest, 10)
    assert copy.fetch(manifest, 10) == 16
