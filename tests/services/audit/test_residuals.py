"""Tests which hypotheses about an engine's samples an audit tests."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from protocol.rollout_view import decode_rollout
from services.audit.auditor import Auditor
from services.audit.live import build_expectations
from services.audit.recompute import POWERS, RowScores
from services.audit.records import Expectations, TrainedGroup
from tests.trainer.groups import GroupSpec, SampleSpec, scored
from tests.trials.silent.world import SCRATCH, settings_of
from trainer.random_model import build_scratch

TOKENS = [5, 6, 7]


@pytest.mark.parametrize(("are_draws", "found"), [(True, {"sampling", "copy"}), (False, set())])
def test_samples_are_tested_only_where_they_were_not_chosen(are_draws: bool, found: set[str]) -> None:
    sample = SampleSpec(TOKENS, [0] * 3, logprobs=[-9.0] * 3)
    record = scored(GroupSpec(samples=[sample] * 4))
    plan = SimpleNamespace(step=0)
    group = TrainedGroup(record, decode_rollout(record.rollout), 0, plan, (0, 1, 2, 3))  # type: ignore[arg-type]
    again = RowScores(np.full(3, -9.0), np.full((3, len(POWERS)), 2.0))
    expectations = Expectations(are_draws=are_draws)
    residuals = Auditor(None, share=1.0, dtype="float32", expectations=expectations).residuals
    residuals.noise.learn("float32", again, again)
    residuals.add(0, group, 0, dict.fromkeys(range(4), again))
    assert {alarm.check for alarm in residuals.alarms(0)} == found


@pytest.mark.parametrize(
    ("section", "changed", "are_draws"),
    [
        ("sampling", {}, True),
        ("sampling", {"keep_first": 2}, False),
        ("algorithm", {"filter_groups": True}, False),
    ],
)
def test_samples_are_chosen_by_their_end_or_their_rewards(
    tmp_path: Path, section: str, changed: dict[str, object], are_draws: bool
) -> None:
    settings = settings_of(tmp_path, 0)
    kind = type(getattr(settings, section))
    settings = settings_of(tmp_path, 0, **{section: kind(**changed)})
    build_scratch(SCRATCH, settings.model_dir)
    assert build_expectations(settings, lambda rollout: None).are_draws is are_draws
