"""Tests that messages of a group from an older release are read."""

import msgspec

from protocol.codec import decode
from protocol.messages import ScoredRollout
from tests.protocol.samples import GOLDEN, SAMPLES, WITHOUT_TURNS


def test_a_scored_rollout_of_a_release_without_remarks_is_read() -> None:
    _, message = decode((GOLDEN / "scored.v2.without_remarks.msgpack").read_bytes())
    new = SAMPLES["scored"]
    assert isinstance(message, ScoredRollout)
    assert isinstance(new, ScoredRollout)
    assert message.remarks == ()
    assert new.remarks != ()
    assert message.rollout == msgspec.structs.replace(new.rollout, branches=None, calls=None, **WITHOUT_TURNS)
