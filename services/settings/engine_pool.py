"""`services.pool`: rollout workers of one run on different engines.

Each entry says how many workers, and what of `[engine]` is different for them; it reaches them as
`TETHER_ENGINE__*` variables.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from protocol.choices import checked_name
from protocol.errors import SettingsError
from rollout.engines.base import EngineConfig
from rollout.engines.registry import ENGINES
from services.settings.sources import refuse_unknown

_adapter: TypeAdapter[EngineConfig] = TypeAdapter(EngineConfig)


@dataclass(frozen=True, slots=True)
class PoolEntry:
    """Workers with one kind of engine."""

    count: int = 1
    engine: dict[str, Any] = field(default_factory=dict)
    """Settings of `[engine]` that are different for these workers."""


def check_pool(pool: Sequence[PoolEntry], base: EngineConfig) -> None:
    """Check every entry as `[engine]` is checked.

    Raises:
        SettingsError: naming the entry's setting.
    """
    for number, entry in enumerate(pool):
        where = f"services.pool.{number}"
        if entry.count < 1:
            raise SettingsError(f"setting {where}.count: {entry.count} is less than 1")
        refuse_unknown(entry.engine, EngineConfig, f"{where}.engine.")
        try:
            engine = _adapter.validate_python({**dataclasses.asdict(base), **entry.engine})
        except ValidationError as error:
            first = error.errors()[0]
            raise SettingsError(
                f"setting {where}.engine.{'.'.join(map(str, first['loc']))}: {first['msg']}"
            ) from None
        checked_name(engine.name, ENGINES, f"setting {where}.engine.name:")
        if engine.dtype != base.dtype:
            raise SettingsError(
                f"setting {where}.engine.dtype: {engine.dtype}, but weights are published in engine.dtype, {base.dtype}"
            )


def pool_size(pool: Sequence[PoolEntry]) -> int:
    """Workers of all entries."""
    return sum(entry.count for entry in pool)


def pool_variables(pool: Sequence[PoolEntry], index: int) -> dict[str, str]:
    """What makes worker `index` one of its entry. Workers beyond the pool's size, after scaling, begin again
    with the first entry."""
    if not pool:
        return {}
    entries = [entry for entry in pool for _ in range(entry.count)]
    return {
        f"TETHER_ENGINE__{name.upper()}": _toml(value)
        for name, value in entries[index % len(entries)].engine.items()
    }


def _toml(value: Any) -> str:
    """A setting's value as TOML; strings and numbers are written as in JSON."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items()) + " }"
    return json.dumps(value)
