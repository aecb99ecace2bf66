"""Tests that messages of a group from an older release are read."""

import msgspec

from protocol.codec import decode
from protocol.messages import ScoredRollout
from tests.protocol.samples import GOLDEN, ROLLOUT, SAMPLES, UNCOUNTED


def test_a_scored_rollout_of_a_release_without_remarks_is_read() -> None:
    _, message = decode((GOLDEN / "scored.v2.without_remarks.msgpack").read_bytes())
    new = SAMPLES["scored"]
    assert isinstance(message, ScoredRollout)
    assert isinstance(new, ScoredRollout)
    assert message.remarks == ()
    assert new.remarks != ()
    old = msgspec.structs.replace(new.rollout, branches=None, calls=None, **UNCOUNTED)
    assert message.rollout == old


def test_a_rollout_of_a_release_without_lengths_of_prompts_is_read() -> None:
    for name in ("rollout", "scored"):
        _, message = decode((GOLDEN / f"{name}.v2.without_own_prompts.msgpack").read_bytes())
        rollout = message.rollout if isinstance(message, ScoredRollout) else message
        assert rollout == msgspec.structs.replace(ROLLOUT, own_prompts=None, cancelled=None)


def test_a_rollout_of_a_release_that_cancelled_no_sample_is_read() -> None:
    for name in ("rollout", "scored"):
        _, message = decode((GOLDEN / f"{name}.v2.without_cancelled.msgpack").read_bytes())
        rollout = message.rollout if isinstance(message, ScoredRollout) else message
        assert rollout == msgspec.structs.replace(ROLLOUT, cancelled=None)


def test_a_rollout_of_a_release_that_did_not_count_what_was_read_is_read() -> None:
    for name in ("rollout", "scored"):
        _, message = decode((GOLDEN / f"{name}.v2.without_read_tokens.msgpack").read_bytes())
        rollout = message.rollout if isinstance(message, ScoredRollout) else message
        assert rollout == msgspec.structs.replace(ROLLOUT, **UNCOUNTED)
