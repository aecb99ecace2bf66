"""Compares what ranks wrote with what a naive loop over Hugging Face computes."""

import json
from pathlib import Path

from safetensors.torch import load_file

from tests.trainer.recomputed.backend_run import assert_equal, differences
from tests.trainer.recomputed.cases import recomputed


def assert_naive(name: str, directory: Path, out: Path) -> None:
    expected, weights = recomputed(name, directory)
    assert_equal(json.loads((out / name / "reports.json").read_text()), expected)
    found = load_file(out / name / "weights.safetensors")
    apart = out / name / "critic.safetensors"
    found |= load_file(apart) if apart.is_file() else {}
    assert max(differences(found.items(), weights).values()) < 1e-6
