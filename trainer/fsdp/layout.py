"""Says which layouts of ranks the FSDP backend has. No torch here: every start is checked with it."""

from collections.abc import Iterator
from dataclasses import fields

from protocol.errors import SettingsError
from trainer.config import ParallelConfig

SIZES = ("data_parallel_size", "use_distributed_optimizer")
"""Settings of `[parallel]` that it reads."""
NOT_SHARDED = "trainer.backend 'fsdp' shards the model over parallel.data_parallel_size ranks alone"


def layout_refusals(parallel: ParallelConfig) -> Iterator[tuple[str, object]]:
    """Yield each setting of `[parallel]` that is set and that the backend does not have, with its value."""
    default = ParallelConfig()
    for field in fields(parallel):
        value = getattr(parallel, field.name)
        if field.name not in SIZES and value != getattr(default, field.name):
            yield f"parallel.{field.name}", value


def check_layout(parallel: ParallelConfig) -> None:
    """Refuse a layout that has more than data-parallel ranks.

    Raises:
        SettingsError: names the setting.
    """
    for setting, value in layout_refusals(parallel):
        raise SettingsError(f"setting {setting}: {value}: {NOT_SHARDED}; leave it out, or use megatron")
