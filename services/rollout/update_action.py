"""Chooses the next weight update of a rollout worker, as a pure function of its state.

The newest committed version has priority over a version that the trainer is still exporting. A sleeping
engine stages no version.
"""

from dataclasses import dataclass

from protocol.messages import WeightManifest
from rollout.engines.base import Served


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage a committed version, then commit it if the ledger still names its epoch."""

    manifest: WeightManifest


@dataclass(frozen=True, slots=True)
class StageProvisional:
    """Stage a version that the trainer is still exporting, without committing it."""

    manifest: WeightManifest
    """Provisional manifest: the layout of an earlier version, without digests."""


@dataclass(frozen=True, slots=True)
class Adopt:
    """Rename the live weights: a new epoch publishes the same bytes."""

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
        newest: newest manifest of the epoch that the ledger names; None before the first version.
        provisional: manifest of a version that the trainer is exporting and that is not staged yet.
        live: the engine's live weights.
        awake: whether the engine holds its memory and may stage.
        staging: provisional manifest whose staging runs. While staging is still useful, the result is
            `StageProvisional(staging)`; any other result cancels the staging.
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
    """Return whether `newest` belongs to another epoch than `staging` or is a later version."""
    return newest is not None and (newest.epoch != staging.epoch or newest.version > staging.version)
