"""Tests the report of a step: older ones are read, and what was not measured is null."""

import json

import msgspec

from protocol.codec import decode, decode_payload, encode_payload
from protocol.messages import Mismatch, StepReport
from tests.protocol.samples import GOLDEN


def test_report_of_an_older_release_is_read() -> None:
    """It was written before fields could be null, with 0 for what was not measured."""
    _, report = decode((GOLDEN / "step_report.v2.without_nulls.msgpack").read_bytes())
    assert isinstance(report, StepReport)
    assert (report.trained_tokens, report.lag_histogram) == (12, {0: 10, 1: 2})
    assert (report.entropy, report.ratio_mean, report.lag_max) == (0.0, 1.0, 0)
    assert (report.behaviour_kl_k3, report.mismatch, report.warnings) == (None, {}, ())


def test_unmeasured_value_of_a_step_is_null() -> None:
    report = StepReport(step=0, version=1, epoch="e1", reward_mean=0.5)
    line = json.loads(msgspec.json.encode(report))
    assert {line[name] for name in ("loss", "entropy", "lag_mean", "pause_ms", "engine_busy")} == {None}
    assert decode_payload(encode_payload(report)) == report


def test_mismatch_of_every_lag_is_kept() -> None:
    found = Mismatch(tokens=3, error_mean=0.1, error_max=0.2, token_mult_prob_error=1.1, ess=0.9)
    report = StepReport(step=0, version=1, epoch="e1", reward_mean=0.5, mismatch={0: found, 2: found})
    assert decode_payload(encode_payload(report)) == report
    assert json.loads(msgspec.json.encode(report))["mismatch"]["2"]["token_mult_prob_error"] == 1.1
