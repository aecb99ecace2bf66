"""Be one of two tensor ranks of which the second never comes to a collective of the first."""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from trainer.config import ParallelConfig
from trainer.megatron import cpu, parallel


def main(out: Path) -> None:
    cpu.install()
    parallel.initialize(ParallelConfig(tensor_model_parallel_size=2), "cpu", 0, timeout_s=5.0)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        try:
            dist.all_reduce(torch.zeros(1), group=mpu.get_tensor_model_parallel_group())
        except RuntimeError as error:
            (out / "error").write_text(str(error))
        store.set("over", "yes")
    store.wait(["over"], timedelta(minutes=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
