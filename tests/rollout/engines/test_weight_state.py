"""Tests `WeightState`: what is served after a commit, a failed commit, a rename, a release."""

import asyncio

import pytest

from protocol.errors import EngineError, PoisonedError, WeightError
from protocol.messages import WeightManifest
from rollout.engines.base import Served
from rollout.engines.weight_state import WeightState


def manifest(version: int) -> WeightManifest:
    return WeightManifest(
        epoch="e1", version=version, transport="shm", location="", buckets=(), tensors=(), digest=7
    )


def serving(version: int) -> WeightState:
    state = WeightState()
    with state.commit(manifest(version)):
        pass
    return state


def test_commit_serves_the_version_only_when_its_body_has_ended() -> None:
    state = WeightState()
    assert state.served == Served()
    with state.commit(manifest(3)):
        assert state.served == Served()
    assert state.served == Served("e1", 3, 7)


def test_commit_refused_before_the_copy_changes_nothing() -> None:
    state = serving(3)
    with pytest.raises(WeightError, match="not staged"), state.commit(manifest(4)):
        raise WeightError("not staged")
    assert (state.served.version, state.poisoned) == (3, "")


@pytest.mark.parametrize(
    "error",
    [PoisonedError("half"), EngineError("half"), RuntimeError("half"), asyncio.CancelledError("half")],
)
def test_commit_that_fails_otherwise_poisons_for_good(error: BaseException) -> None:
    state = serving(3)
    with pytest.raises(PoisonedError, match="half"), state.commit(manifest(4)):
        raise error
    assert state.served.version == 3
    assert "half" in state.poisoned
    with pytest.raises(PoisonedError, match="half"), state.commit(manifest(5)):
        pytest.fail("a poisoned state commits nothing")


def test_released_weights_serve_nothing_until_the_next_commit() -> None:
    state = serving(3)
    state.release()
    assert (state.served, state.released, state.asleep, state.admits_requests) == (
        Served(),
        True,
        True,
        False,
    )
    state.wake()
    assert (state.served, state.released, state.asleep, state.admits_requests) == (
        Served(),
        True,
        False,
        False,
    )
    with pytest.raises(WeightError):
        state.renamed("e2", 4)
    with pytest.raises(WeightError), state.changing(), state.commit(manifest(4)):
        raise WeightError("not staged")
    assert not state.admits_requests
    with state.changing(), state.commit(manifest(4)):
        pass
    assert (state.served.version, state.released, state.admits_requests) == (4, False, True)


def test_requests_are_admitted_except_during_a_change() -> None:
    state = serving(3)
    with state.changing():
        assert not state.admits_requests
    assert state.admits_requests


def test_staging_is_excluded_until_the_last_pending_commit_has_ended() -> None:
    state = serving(3)
    with state.pending_commit():
        with state.pending_commit():
            assert state.committing
        assert state.committing
    assert not state.committing


def test_rename_keeps_the_digest() -> None:
    state = serving(3)
    state.serve(state.renamed("e2", 9))
    assert state.served == Served("e2", 9, 7)
    with pytest.raises(WeightError, match="no version"):
        WeightState().renamed("e2", 9)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (EngineError("rank 1: no room"), "wake: rank 1: no room"),
        (asyncio.CancelledError(), "wake did not end"),
    ],
)
def test_failure_of_a_step_poisons_with_its_name(error: BaseException, reason: str) -> None:
    state = serving(3)
    with pytest.raises(type(error)), state.poisoned_by_failure("wake"):
        raise error
    assert state.poisoned == reason
    other = serving(3)
    with other.poisoned_by_failure("wake"):
        pass
    assert other.poisoned == ""
