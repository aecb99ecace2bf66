"""Computes from the settings the host memory of `fsdp` ranks. No torch here."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from trainer.fsdp.memory.expected import FLOAT32, ShardedWorkload
from trainer.memory.expected import ITEM_BYTES
from trainer.memory.host import STATE_BYTES, ExpectedHostMemory, HostRun, transfer_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedHost(HostRun[ShardedWorkload]):
    """Run of `fsdp` ranks, of which each host has as many."""

    def expected(self) -> ExpectedHostMemory:
        """Return the memory of a host, of which all have as many ranks."""
        work, ranks = self.work, self.work.parallel.data_parallel_size
        stepped = ceil(work.stepped / ranks)
        offloads, held = work.optimizer.cpu_offload, work.trainer.offload_parameters
        moments = STATE_BYTES - FLOAT32 * held  # the parameters are the masters
        largest = max(model.layer + model.outside for model in work.models)
        return ExpectedHostMemory(
            model=self.ranks * (self._device_bytes() + 2 * FLOAT32 * held * stepped),
            optimizer=self.ranks * offloads * moments * stepped,
            transfers=self.ranks * (offloads and not held) * transfer_bytes(stepped, largest, 2 * FLOAT32),
            checkpoint=self.ranks * STATE_BYTES * stepped,
            export=work.model.whole * ITEM_BYTES[work.trainer.dtype] // self.hosts,
        )

    def alternatives(self) -> Iterator[tuple[str, "ShardedHost"]]:
        """Yield settings that may take less memory and the run with them, the cheapest first."""
        work = self.work
        if self.on_gpu:
            on_device = dataclasses.replace(
                work,
                trainer=dataclasses.replace(work.trainer, offload_parameters=False),
                optimizer=dataclasses.replace(work.optimizer, cpu_offload=False),
            )
            names = ["optimizer.cpu_offload"]
            if work.trainer.offload_parameters:
                names.append("trainer.offload_parameters")
            settings = " and ".join(f"{name} = false" for name in names)
            yield settings, dataclasses.replace(self, work=on_device)

    def _device_bytes(self) -> int:
        """Return the bytes of a rank that are on the host because it has no device, or not always."""
        found = self.work.expected(1)
        if not self.on_gpu:
            return found.parameters + found.gradients + found.optimizer
        return self.turns * (found.parameters + found.optimizer)
