"""Predicts the host memory of `fsdp` ranks from the settings. Does not import torch."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from trainer.fsdp.memory.expected import FLOAT32, ShardedWorkload
from trainer.memory.expected import ITEM_BYTES
from trainer.memory.host import STATE_BYTES, ExpectedHostMemory, HostRun, transfer_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedHost(HostRun[ShardedWorkload]):
    """Run of `fsdp` ranks, distributed equally over hosts."""

    def expected(self) -> ExpectedHostMemory:
        """Return the expected memory of one host; all hosts have the same number of ranks."""
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
        """Yield settings that may need less memory, each with the resulting run, the cheapest first."""
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
        """Return the bytes of a rank's device state that are in host memory, permanently or temporarily."""
        found = self.work.expected(1)
        if not self.on_gpu:
            return found.parameters + found.gradients + found.optimizer
        return self.turns * (found.parameters + found.optimizer)
