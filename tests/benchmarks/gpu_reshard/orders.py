"""Rank 0 of the trainer: makes steps on all ranks and publishes versions, on orders."""

import json
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import msgspec
import torch
import xxhash

from protocol.codec import encode_payload
from protocol.device.slice_digests import digests_of
from protocol.messages import TensorEntry
from protocol.weights.buckets import manifest_digest
from rollout.staging.staging import dtype_name
from tests.benchmarks.gpu.shapes import settle
from tests.benchmarks.gpu_reshard.follower import Memory
from tests.trainer.groups import GroupSpec, SampleSpec, scored
from trainer.execution.commands import (
    CopyWeightsCommand,
    DraftCommand,
    ExitCommand,
    IdleCommand,
    PublishCommand,
)
from trainer.execution.executor import Executor
from trainer.roles.models import RankModels
from trainer.step.train_command import TrainCommand
from trainer.weights.base import WeightSender

EPOCH = "bench"
CONNECT_S = 60.0
FACTOR = 1.015625
SAMPLES, TOKENS = 16, 64
"""Samples of the batch of each step, and tokens of each."""
ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
"""Modules whose tensors an engine divides by rows between its tensor-parallel ranks."""
COLUMNS = ("o_proj", "down_proj")
"""Those that it divides by columns; other tensors are whole on every rank."""


class Orders:
    """Carries out orders: each public method but `warm_up`, `serve` and `close` is one."""

    def __init__(
        self,
        models: RankModels,
        sender: WeightSender,
        memory: Memory,
        dtype: str,
        others: Sequence[Path],
        perturb: Callable[[float], None] | None = None,
    ) -> None:
        """Connect to the sockets of the other ranks.

        Args:
            models: rank 0's.
            sender: of the weights.
            memory: of this process.
            dtype: in which versions are published.
            others: sockets of the other ranks.
            perturb: multiplies this rank's weights, where that is to stand for a step.
        """
        self._perturb = perturb
        self._leader = Executor(models, sender)
        self._dtype = dtype
        self._memory = memory
        self._sender = sender
        self._others = [_Line(path) for path in others]
        self._steps, self._began, self._version = 0, 0.0, 0
        self._exits, self._where = False, "gpu"
        publication = models.policy.publication
        self._shapes = list(zip(publication.names, publication.shapes, strict=True))
        self._model = 0
        """Bytes that are allocated for training alone."""

    def warm_up(self) -> None:
        """Make two steps and two versions, so that everything that is kept is there."""
        self.step()
        self._model = self._memory.found()["after"]
        for version in (1, 2):
            self.publish(version)
            self.step()

    def describe(self) -> dict[str, Any]:
        """Return what there is before an engine starts."""
        size = getattr(torch, self._dtype).itemsize
        count = sum(torch.Size(shape).numel() for _, shape in self._shapes)
        return {
            "bytes": count * size,
            "tensors": len(self._shapes),
            "by_rank": self._sender.in_parts,
            "training_bytes": self._model,
            "memory": self.memory()["ranks"],
        }

    def serve(self, path: Path) -> None:
        """Answer one client after the other until one says exit."""
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(1)
            while not self._exits:
                connection, _ = listener.accept()
                with connection, connection.makefile("rw") as lines:
                    self._answer(lines)

    def close(self) -> None:
        """Close sender and model."""
        self._sender.close()
        self._leader.close()

    def last(self) -> dict[str, Any]:
        """Return the number of the version published last."""
        return {"version": self._version}

    def step(self) -> dict[str, Any]:
        """Make an optimizer step on all ranks, or what stands for it; return when it had ended."""
        if self._perturb is not None:
            factor = FACTOR if self._steps % 2 else 1 / FACTOR
            self._tell("perturb", factor=factor)
            self._perturb(factor)
        else:
            self._go()
            self._leader.train(_command(self._steps))
        self._steps += 1
        settle()
        self._tell("mark")
        self._memory.mark()
        self._began = time.monotonic()
        return {"began": self._began}

    def draft(self, version: int) -> dict[str, Any]:
        """Let engines receive a version while it is published, if the transport can do that."""
        self._go()
        return {"drafted": self._leader.lead(DraftCommand(EPOCH, version)) is not None}

    def publish(self, version: int) -> dict[str, Any]:
        """Publish a version; return its manifest, in hex, when the step had ended and when this has."""
        self._go()
        manifest = self._leader.lead(PublishCommand(EPOCH, version, self._dtype))
        ended, self._version = time.monotonic(), version
        data = msgspec.msgpack.encode(manifest).hex()
        return {"began": self._began, "ended": ended, "manifest": data}

    def retire(self, version: int) -> dict[str, Any]:
        """Forget versions before this one."""
        self._sender.retire(frozenset({version}))
        return {}

    def wait(self, where: str) -> dict[str, Any]:
        """Let the other ranks wait for commands on the "gpu", as they do, or on the "host"."""
        if where != self._where:
            self._where = where
            self._tell("wait", where=where)
            self._leader.lead(IdleCommand())
        return {}

    def memory(self) -> dict[str, Any]:
        """Return what each rank had allocated before and after the last publication, and the most."""
        return {"ranks": [self._memory.found(), *self._tell("memory")]}

    def digest(self, ranks: int) -> dict[str, Any]:
        """Return the digest of the weights, and what an engine of so many ranks that has them has to say."""
        self._go()
        whole, live = self._digests(ranks)
        return {"version": whole, "live": live}

    def exit(self) -> dict[str, Any]:
        """End the other ranks, and then this one."""
        self._exits = True
        self._go()
        self._leader.lead(ExitCommand())
        return {}

    def _digests(self, ranks: int) -> tuple[int, int]:
        parts: list[list[TensorEntry]] = [[] for _ in range(ranks)]
        whole = []
        for name, tensor in self._leader.lead(CopyWeightsCommand(self._dtype)).items():
            whole.append(_entry(name, tensor))
            for rank in range(ranks):
                parts[rank].append(_entry(name, held_by(name, tensor, rank, ranks)))
        found = manifest_digest(whole)
        if ranks == 1:
            return found, found
        held = [manifest_digest(part) for part in parts]
        return found, xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(held))

    def _answer(self, lines: TextIO) -> None:
        for line in lines:
            order = json.loads(line)
            try:
                method: Callable[..., dict[str, Any]] = getattr(self, order.pop("do"))
                answer = method(**order)
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            lines.write(json.dumps(answer) + "\n")
            lines.flush()
            if self._exits:
                return

    def _go(self) -> None:
        self._tell("go")

    def _tell(self, do: str, **order: Any) -> list[dict[str, Any]]:
        return [line.ask(do, **order) for line in self._others]


class _Line:
    """A connection to another rank."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        end = time.monotonic() + CONNECT_S
        while True:
            try:
                self._socket.connect(str(path))
                break
            except (FileNotFoundError, ConnectionRefusedError):  # it is about to listen
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)
        self._lines = self._socket.makefile("rw")

    def ask(self, do: str, **order: Any) -> dict[str, Any]:
        self._lines.write(json.dumps({"do": do, **order}) + "\n")
        self._lines.flush()
        answer: dict[str, Any] = json.loads(self._lines.readline())
        return answer


def _command(step: int) -> TrainCommand:
    samples = [
        SampleSpec([5 + sample] * TOKENS, [step] * TOKENS, float(sample % 2)) for sample in range(SAMPLES)
    ]
    return TrainCommand(
        step=step,
        records=[encode_payload(scored(GroupSpec(group=step, samples=samples)))],
        bounds=[1],
        mask_late=True,
        temperature=1.0,
        recompute_logprobs=False,
        reference_logprobs=False,
    )


def held_by(name: str, tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Return the tensor with zeros where an engine's rank does not hold it."""
    module = name.split(".")[-2]
    if module not in ROWS + COLUMNS:
        return tensor
    dim = 0 if module in ROWS else 1
    held, size = torch.zeros_like(tensor), tensor.shape[dim] // ranks
    held.narrow(dim, rank * size, size).copy_(tensor.narrow(dim, rank * size, size))
    return held


def _entry(name: str, tensor: torch.Tensor) -> TensorEntry:
    (digest,) = digests_of([tensor])
    return TensorEntry(name, dtype_name(tensor.dtype), tuple(tensor.shape), 0, 0, tensor.nbytes, digest)
