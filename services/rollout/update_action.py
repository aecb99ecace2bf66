"""Decides what a rollout worker does next about its engine's weights: a pure function of its state.

The newest committed version comes first, then a version that the trainer is still making. No version is
staged while the engine sleeps.
"""

from dataclasses import dataclass

from protocol.messages import WeightManifest
from rollout.engines.base import Served


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage a committed version and commit it, if the ledger still names its epoch by then."""

    manifest: WeightManifest


@dataclass(frozen=True, slots=True)
class StageProvisional:
    """Stage a version that the trainer is still making, without committing it."""

    manifest: WeightManifest
    """Provisional: the layout of an earlier version, without digests."""


@dataclass(frozen=True, slots=True)
class Adopt:
    """Rename the live weights: they are the manifest's, under an epoch that is over."""

    manifest: WeightManifest


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until the state changes."""


UpdateAction = Stage | StageProvisional | Adopt | Wait


def next_action(
    newest: WeightManifest | None,
    provisional: WeightManifest | None,
    live: Served,
    *,
    awake: bool,
    staging: WeightManifest | None = None,
) -> UpdateAction:
    """Return the next action.

    Args:
        newest: newest manifest of the epoch that the ledger names; None before the first.
        provisional: manifest of a version that the trainer is making and that was not begun yet.
        live: the engine's live weights.
        awake: whether the engine holds its memory and may stage.
        staging: provisional manifest that is being staged. The answer is `StageProvisional` of it while that
            is of use, anything else says that it is to be cancelled.
    """
    if not awake:
        return Wait()
    if staging is not None and not _supersedes(newest, staging):
        return StageProvisional(staging)
    if newest is not None and (newest.epoch, newest.version) != (live.epoch, live.version):
        same_weights = (newest.version, newest.digest) == (live.version, live.digest)
        return Adopt(newest) if same_weights else Stage(newest)
    if provisional is not None and provisional.epoch == live.epoch and provisional.version > live.version:
        return StageProvisional(provisional)
    return Wait()


def _supersedes(newest: WeightManifest | None, staging: WeightManifest) -> bool:
    """Return whether another epoch or a later version is wanted than the one that is being staged."""
    return newest is not None and (newest.epoch != staging.epoch or newest.version > staging.version)
