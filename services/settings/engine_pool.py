"""Validates `services.pool`: rollout workers of one run on different engines.

Each entry has a number of workers and their overrides of `[engine]`. Workers get the overrides as
`TETHER_ENGINE__*` variables.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Interval

from protocol.choices import is_own
from protocol.errors import SettingsError
from protocol.validation import validated
from protocol.weights.lora import LoraConfig
from rollout.engines.arguments import check_arguments
from rollout.engines.base import EngineConfig
from rollout.engines.registry import ENGINES
from rollout.engines.vllm.drafts.models import MODELS
from services.settings.sources import to_toml
from trainer.weights.registry import TRANSPORTS

REREADABLE_TRANSPORTS = TRANSPORTS.having("files")
"""Transports that allow a version to be read twice, when it is staged and when it is committed."""


@dataclass(frozen=True, slots=True)
class PoolEntry:
    """Entry of `services.pool`: workers with the same engine settings."""

    count: Annotated[int, Interval(ge=1, le=10_000)] = 1
    """Number of rollout workers of this kind."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Overrides of `[engine]` for these workers."""


def check_pool(pool: Sequence[PoolEntry], base: EngineConfig) -> None:
    """Validate the arguments of `[engine]`, and the engine settings of every pool entry.

    Raises:
        SettingsError: an entry is invalid; the message names its setting.
    """
    check_arguments(base, "engine.arguments")
    _check_profile(base, pool)
    if not pool:
        _check_drafts(base, "engine")
        _check_staging(base, "engine")
    for number, entry in enumerate(pool):
        prefix = f"services.pool.{number}.engine"
        lr = engine_with(base, entry.engine, prefix).draft_lr
        if lr not in (0, base.draft_lr):
            raise SettingsError(
                f"setting {prefix}.draft_lr: {lr}, but versions have the head that engine.draft_lr, "
                f"{base.draft_lr}, trains; remove the setting, or set it to 0"
            )


def check_staging(pool: Sequence[PoolEntry], base: EngineConfig, transport: str, lora: LoraConfig) -> None:
    """Check that each engine's `staging` is compatible with the transport and with adapters.

    Args:
        pool: entries of `services.pool`.
        base: section `[engine]`.
        transport: value of `weights.transport`.
        lora: section `[lora]`.

    Raises:
        SettingsError: `staging` is incompatible; the message has the setting and the reason.
    """
    engines = {f"services.pool.{n}.engine": entry.engine for n, entry in enumerate(pool)} or {"engine": {}}
    for prefix, changes in engines.items():
        place = engine_with(base, changes, prefix).staging
        if place == "layers" and transport not in REREADABLE_TRANSPORTS:
            raise SettingsError(
                f"setting {prefix}.staging: 'layers' reads a version twice, and weights.transport "
                f"{transport!r} sends it once; use 'host', or weights.transport "
                f"{' or '.join(REREADABLE_TRANSPORTS)}"
            )
        if place in ("host", "copy") and transport == "shared":
            raise SettingsError(
                f"setting {prefix}.staging: with weights.transport 'shared' there is no copy to place; "
                "remove the setting"
            )
        if place in ("host", "layers") and lora.rank:
            raise SettingsError(
                f"setting {prefix}.staging: with lora.rank {lora.rank} only the adapter is staged, "
                "which is small; remove the setting"
            )


def restrict_staging(engine: EngineConfig, transport: str) -> EngineConfig:
    """Return engine settings in which `staging = auto` chooses only places that the transport allows."""
    if engine.staging == "auto" and transport not in REREADABLE_TRANSPORTS:
        return dataclasses.replace(engine, staging="copy")
    return engine


def engine_with(base: EngineConfig, changes: Mapping[str, Any], prefix: str) -> EngineConfig:
    """Return `[engine]` with `changes` applied.

    Raises:
        SettingsError: a setting is invalid; the message names it under `prefix` with the allowed values.
    """
    engine = validated(EngineConfig, {**dataclasses.asdict(base), **changes}, f"setting {prefix}.")
    if changes.keys() & {"name", "arguments"}:  # else `check_pool` validates `[engine]`'s own arguments
        check_arguments(engine, f"{prefix}.arguments")
    _check_drafts(engine, prefix)
    _check_staging(engine, prefix)
    if engine.dtype != base.dtype:
        raise SettingsError(
            f"setting {prefix}.dtype: {engine.dtype}, but weights are published in engine.dtype, {base.dtype}"
        )
    return engine


def _check_staging(engine: EngineConfig, prefix: str) -> None:
    able = ENGINES.having("places")
    if engine.staging in ("host", "layers") and engine.name not in able and not is_own(engine.name):
        raise SettingsError(
            f"setting {prefix}.staging: engine {engine.name!r} stages on the device alone; "
            f"use {', '.join(able[:-1])} or {able[-1]}, or set it to 'device'"
        )


def _check_drafts(engine: EngineConfig, prefix: str) -> None:
    if engine.draft_model and engine.drafts not in MODELS:
        raise SettingsError(
            f"setting {prefix}.draft_model: no drafts come from it while {prefix}.drafts is "
            f"{engine.drafts!r}; set that to 'model', or leave this out"
        )
    if engine.drafts == "off":
        return
    if engine.name not in (able := ENGINES.having("drafts")):
        raise SettingsError(
            f"setting {prefix}.drafts: engine {engine.name!r} verifies no drafts; "
            f"use {' or '.join(able)}, or set it to 'off'"
        )


def _check_profile(base: EngineConfig, pool: Sequence[PoolEntry]) -> None:
    versions = base.profile_versions
    if not versions:
        return
    if len(versions) != 2 or versions[0] > versions[1]:
        raise SettingsError(
            f"setting engine.profile_versions: {list(versions)} is not the first and the last version to "
            "profile, such as [10, 12]"
        )
    for name in engine_names(base, pool):
        if name not in (able := ENGINES.having("profiles")):
            raise SettingsError(
                f"setting engine.profile_versions: torch.profiler cannot profile engine {name!r}; "
                f"remove the setting, or use {' or '.join(able)}"
            )


def pool_size(pool: Sequence[PoolEntry]) -> int:
    """Return the number of workers in all entries."""
    return sum(entry.count for entry in pool)


def pool_variables(pool: Sequence[PoolEntry], index: int) -> dict[str, str]:
    """Return the environment variables with the engine overrides of worker `index`.

    Workers beyond the size of the pool, which scaling can add, start again at the first entry.
    """
    if not pool:
        return {}
    entries = [entry for entry in pool for _ in range(entry.count)]
    engine = entries[index % len(entries)].engine
    return {f"TETHER_ENGINE__{name.upper()}": to_toml(value) for name, value in engine.items()}


def engine_names(engine: EngineConfig, pool: Sequence[PoolEntry]) -> list[str]:
    """Return the names of a run's engines: from the pool, or from `[engine]` without a pool."""
    return [str(entry.engine.get("name", engine.name)) for entry in pool] or [engine.name]
