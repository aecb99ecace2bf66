"""`next_action`: which update a rollout worker begins, continues or cancels, one row per situation."""

import pytest

from protocol.messages import WeightManifest
from protocol.weights.provisional import provisional_manifest
from rollout.engines.base import Served
from services.rollout.update_action import Adopt, Stage, StageProvisional, UpdateAction, Wait, next_action


def manifest(epoch: str, version: int, digest: int = 0) -> WeightManifest:
    return WeightManifest(
        epoch=epoch,
        version=version,
        transport="shm",
        location="/dev/shm/x",
        buckets=(),
        tensors=(),
        digest=digest or 100 + version,
    )


A3, A4, A5, A6 = (manifest("a", version) for version in (3, 4, 5, 6))
B2, B3, B4 = (manifest("b", version) for version in (2, 3, 4))
A4_OTHER_BITS = manifest("a", 4, digest=7)
COMING_A4, COMING_A5, COMING_B5 = (
    provisional_manifest(A3, 4),
    provisional_manifest(A4, 5),
    provisional_manifest(B4, 5),
)
FRESH = Served()
AT_A3, AT_A4 = Served("a", 3, A3.digest), Served("a", 4, A4.digest)


@pytest.mark.parametrize(
    ("wanted", "provisional", "served", "expected"),
    [
        # a fresh engine, or one that has just woken
        (None, None, FRESH, Wait()),
        (A3, None, FRESH, Stage(A3)),
        (A3, COMING_A4, FRESH, Stage(A3)),
        # the engine serves what is wanted
        (A4, None, AT_A4, Wait()),
        (A4, COMING_A5, AT_A4, StageProvisional(COMING_A5)),
        # a provisional version that is committed by now, or of another epoch than the live weights
        (A4, COMING_A4, AT_A4, Wait()),
        (A4, COMING_B5, AT_A4, Wait()),
        # a later version
        (A4, None, AT_A3, Stage(A4)),
        (A4, COMING_A5, AT_A3, Stage(A4)),
        (A6, COMING_A5, AT_A4, Stage(A6)),
        # another epoch: the same version with the same weights is renamed, anything else is staged
        (B4, None, AT_A4, Adopt(B4)),
        (B4, COMING_B5, AT_A4, Adopt(B4)),
        (B3, None, AT_A4, Stage(B3)),
        (B2, None, AT_A4, Stage(B2)),
        (manifest("b", 4, digest=7), None, AT_A4, Stage(manifest("b", 4, digest=7))),
        (manifest("b", 5, digest=A4.digest), None, AT_A4, Stage(manifest("b", 5, digest=A4.digest))),
        # the same epoch and version with another digest changes nothing: the engine serves that version
        (A4_OTHER_BITS, None, AT_A4, Wait()),
    ],
)
def test_next_action_without_staging_in_progress(
    wanted: WeightManifest | None, provisional: WeightManifest | None, served: Served, expected: UpdateAction
) -> None:
    assert next_action(wanted, provisional, served, awake=True) == expected
    assert next_action(wanted, provisional, served, awake=False) == Wait()


@pytest.mark.parametrize(
    ("wanted", "served", "continues"),
    [
        (A4, AT_A4, True),
        (A5, AT_A4, True),  # its own manifest: what has arrived is committed under it
        (A6, AT_A4, False),
        (B4, AT_A4, False),
        (B2, AT_A4, False),
    ],
)
def test_provisional_staging_is_given_up_once_it_cannot_be_committed_next(
    wanted: WeightManifest, served: Served, continues: bool
) -> None:
    expected = StageProvisional(COMING_A5)
    assert (next_action(wanted, None, served, awake=True, staging=COMING_A5) == expected) is continues
    assert next_action(wanted, None, served, awake=False, staging=COMING_A5) == Wait()


def test_newer_provisional_version_does_not_replace_the_one_being_staged() -> None:
    newer = provisional_manifest(A5, 6)
    assert next_action(A5, newer, AT_A4, awake=True, staging=COMING_A5) == StageProvisional(COMING_A5)
