"""The trainer's process: holds the weights on its device under their checkpoint names and publishes them.

    python -m tests.benchmarks.gpu.trainer --model DIR --dtype bfloat16

Orders come as lines of JSON on stdin, {"do": NAME, ...}; each is answered by one line on stdout, {"error"} if
it could not be done.
"""

import argparse
import dataclasses
import faulthandler
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import msgspec
import torch

from protocol.device.checkpoint_shapes import checkpoint_shapes
from rollout.staging.staging import digest_of
from tests.benchmarks.gpu import stand_in
from tests.benchmarks.gpu.groups import HOST, broadcast, join_pair
from tests.benchmarks.gpu.host_trainer import HostTrainer
from tests.benchmarks.gpu.shapes import device, group_backend, settle
from tests.trainer.weights.senders import sender_of
from trainer.config import WeightConfig
from trainer.weights.base import WeightSender
from trainer.weights.bucket_writer import in_dtype

STEP = 1.015625
"""What a step multiplies all weights with, and the next one divides them by: every byte of a version may
differ from the one before."""


class Trainer:
    """Rank 0 of a trainer, with the weights and a sender. Each public method is an order."""

    def __init__(self, model_dir: Path, dtype: str) -> None:
        torch.manual_seed(0)
        self._dtype = dtype
        shapes = checkpoint_shapes(model_dir)
        self._tensors = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device=device()).normal_(std=0.02)
            for name, shape in shapes.items()
        }
        self._sender: WeightSender | None = None
        self._steps = 0
        self._began = 0.0
        """When the last step had ended."""
        self._group: Any = None
        self._communicator: Any = None
        self._directory = tempfile.TemporaryDirectory(
            prefix="tether-bench-trainer-", ignore_cleanup_errors=True
        )
        settle()

    def describe(self) -> dict[str, Any]:
        """Return the bytes of the weights, and name and shape of each tensor."""
        nbytes = sum(tensor.nbytes for tensor in self._tensors.values())
        return {
            "bytes": nbytes,
            "shapes": [(name, list(tensor.shape)) for name, tensor in self._tensors.items()],
        }

    def open(self, transport: str, bucket_mb: int) -> dict[str, Any]:
        """Make the sender of a transport."""
        self.close()
        config = WeightConfig(transport=transport, backend=group_backend(), keep=1, timeout_s=60.0)
        if bucket_mb:
            config = dataclasses.replace(config, bucket_mb=bucket_mb)
        tensors = in_dtype(self._tensors.items(), self._dtype)
        self._sender = sender_of(config, tensors, Path(self._directory.name), "bench-gpu")
        return {}

    def draft(self, version: int) -> dict[str, Any]:
        """Whether the version can be received while it is published."""
        assert self._sender is not None
        return {"drafted": self._sender.provisional("bench", version) is not None}

    def publish(self, version: int) -> dict[str, Any]:
        """What the trainer does after a step. Returns the manifest, in hex, when the step had ended and when
        this has."""
        assert self._sender is not None
        manifest = self._sender.publish("bench", version, in_dtype(self._tensors.items(), self._dtype))
        return {
            "began": self._began,
            "ended": time.monotonic(),
            "manifest": msgspec.msgpack.encode(manifest).hex(),
        }

    def retire(self, version: int) -> dict[str, Any]:
        """Forget versions before this one."""
        if self._sender is not None:
            self._sender.retire(frozenset({version}))
        return {}

    def close(self) -> dict[str, Any]:
        """Close the sender."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()
        return {}

    def join(self, port: int) -> dict[str, Any]:
        """Make the group of two for broadcasts tensor by tensor."""
        self._group = join_pair(port, rank=0)
        return {}

    def send(self) -> dict[str, Any]:
        """Broadcast every tensor on its own."""
        for tensor in self._tensors.values():
            broadcast(self._group, tensor)
        settle()
        return {"began": self._began, "ended": time.monotonic()}

    def step(self) -> dict[str, Any]:
        """A step, not measured. Returns when it had ended."""
        torch._foreach_mul_(list(self._tensors.values()), STEP if self._steps % 2 == 0 else 1 / STEP)
        self._steps += 1
        settle()
        self._began = time.monotonic()
        return {"began": self._began}

    def join_vllm(self, port: int) -> dict[str, Any]:
        """Make the communicator that vLLM's NCCL weight transfer uses."""
        from vllm.distributed.weight_transfer import nccl_common

        stand_in.install()
        self._communicator = nccl_common.stateless_init_process_group(HOST, port, 0, 2, device().index or 0)
        return {}

    def send_vllm(self) -> dict[str, Any]:
        """Broadcast packed, with vLLM's producer and its own defaults."""
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        packed_nccl_broadcast_producer(
            iter(self._tensors.items()), self._communicator, 0, lambda item: item[1]
        )
        settle()
        return {"began": self._began, "ended": time.monotonic()}

    def export_vllm(self) -> dict[str, Any]:
        """IPC handles of all tensors, as vLLM's trainer side makes them for its IPC weight transfer."""
        from torch.multiprocessing import reductions
        from vllm.distributed.weight_transfer import clients

        stand_in.install()
        torch.cuda.ipc_collect()  # of the update before
        where = str(torch.cuda.get_device_properties(device().index or 0).uuid)
        info = {
            "names": list(self._tensors),
            "dtype_names": [self._dtype] * len(self._tensors),
            "shapes": [list(tensor.shape) for tensor in self._tensors.values()],
            "ipc_handles": [
                {where: reductions.reduce_tensor(tensor)[1]} for tensor in self._tensors.values()
            ],
        }
        return {"began": self._began, "ended": time.monotonic(), "info": clients._json_safe_update_info(info)}

    def digest(self) -> dict[str, Any]:
        """Return the digest of the present weights."""
        return {"digest": digest_of(self._tensors)}

    def memory(self) -> dict[str, Any]:
        """The most that this process has held on the device, in bytes."""
        return {"peak": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0}


def main() -> None:
    """Make the weights, report that, and execute commands until stdin ends."""
    parser = argparse.ArgumentParser(description="The trainer's side of the GPU benchmark.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--on-host", action="store_true", help="hold no weights, see host_trainer.py")
    arguments = parser.parse_args()
    faulthandler.register(signal.SIGUSR1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever libraries print must not lie among the answers
    torch.set_num_threads(1)
    kind = HostTrainer if arguments.on_host else Trainer
    trainer = kind(arguments.model, arguments.dtype)
    try:
        answers.write(json.dumps(trainer.describe()) + "\n")
        for line in sys.stdin:
            order = json.loads(line)
            try:
                answer = getattr(trainer, order.pop("do"))(**order)
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(answer) + "\n")
    finally:
        trainer.close()


if __name__ == "__main__":
    main()
