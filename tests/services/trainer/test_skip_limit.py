"""Tests after how many skipped steps in a row a run is to be halted, and for which cause."""

from protocol.messages import StepReport
from services.trainer.skip_limit import SkipLimit

CAUSE = "the gradient's norm is nan"


def report(step: int, skipped: str = CAUSE) -> StepReport:
    return StepReport(step=step, version=step + 1, epoch="e1", reward_mean=0.0, skipped=skipped)


def test_skip_limit_is_reached_by_skipped_steps_in_a_row() -> None:
    limit = SkipLimit(2)
    causes = [limit.cause_after(report(step, skipped)) for step, skipped in enumerate((CAUSE, "", CAUSE, CAUSE))]
    assert causes[:3] == ["", "", ""]
    assert causes[3].startswith("2 steps in a row were skipped")
    assert CAUSE in causes[3]
    assert limit.cause_after(report(4)) == ""  # counted anew after the halt
    assert limit.cause_after(report(5)) != ""


def test_skip_limit_of_one_allows_no_skipped_step() -> None:
    limit = SkipLimit(1)
    assert limit.cause_after(report(0, "")) == ""
    assert limit.cause_after(report(1)) != ""
