"""The places of groups in a run with `run.deterministic`."""

from services.ledger.interface import TakenBatch, TakenGroup
from services.settings.sections import BoundConfig
from services.trainer.lockstep import find_misplaced_group


def batch(step: int, *groups: tuple[int, int]) -> TakenBatch:
    """A batch of groups, each with its number and its version."""
    return TakenBatch(
        step, tuple(TakenGroup(group, "t", step, 1, version, {version: 1}) for group, version in groups)
    )


def test_a_group_that_is_not_at_its_place_is_named() -> None:
    bound = BoundConfig(max_staleness=1, groups_per_step=2)
    assert find_misplaced_group(batch(0, (0, 0), (1, 0)), bound) == ""
    assert find_misplaced_group(batch(3, (6, 2), (7, 2)), bound) == ""
    assert "group 8 of version 2 in the place of group 7 of version 2" in find_misplaced_group(
        batch(3, (6, 2), (8, 2)), bound
    )
    assert "group 7 of version 3 in the place of group 7 of version 2" in find_misplaced_group(
        batch(3, (6, 2), (7, 3)), bound
    )
