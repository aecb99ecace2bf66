"""Tests that a version published while its step is made is the one that the step makes, or none."""

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from protocol.codec import encode_payload
from protocol.errors import WeightError
from protocol.messages import WeightDraft, WeightManifest
from services.trainer import model_runner
from services.trainer.model_runner import ModelRunner
from tests.trainer.commands import train_command
from tests.trainer.groups import GroupSpec, SampleSpec, scored
from tests.trainer.megatron.models import OPTIMIZER, save_model
from tests.trainer.megatron.ranks import ALGORITHM
from trainer.backends import host_transfers
from trainer.backends.base import Backend
from trainer.backends.scripted import ScriptedBackend
from trainer.config import ParallelConfig, TrainerConfig, WeightConfig
from trainer.execution.commands import IdleCommand, RankCommand
from trainer.execution.executor import Executor
from trainer.megatron.backend import MegatronBackend
from trainer.roles.models import RankModels
from trainer.step.train_command import TrainCommand
from trainer.weights.base import WeightSender
from trainer.weights.bucket_writer import Named
from trainer.weights.files import disk_sender
from trainer.weights.part_layout import blank_manifest
from trainer.weights.served.sender import PartSender

SMALL = 5000
"""Elements of a chunk, so that the model has several."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen2", tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_transfers, "CHUNK_ELEMENTS", SMALL)


def _on_disk(config: WeightConfig, _: Backend) -> WeightSender:
    return disk_sender(config, Path(config.directory))


class SeenSender(PartSender):
    """Says when the first tensor of a version has come."""

    def __init__(self, backend: Backend) -> None:
        blank = blank_manifest(backend.publication, "bfloat16", 1 << 20, "nccl")
        super().__init__(WeightConfig(transport="nccl", backend="gloo", bucket_mb=1), 0, blank)
        self.has_one = threading.Event()

    def publish(self, epoch: str, version: int, tensors: Named, *, base_model: str = "") -> WeightManifest:
        def seen() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors:
                yield name, tensor
                self.has_one.set()

        return super().publish(epoch, version, seen(), base_model=base_model)


@asynccontextmanager
async def opened(
    model_dir: Path, make: Callable[[Backend], WeightSender], *, cpu_offload: bool = True
) -> AsyncIterator[ModelRunner]:
    thread = ThreadPoolExecutor(1)

    def load() -> MegatronBackend:
        return MegatronBackend(
            model_dir,
            parallel=ParallelConfig(),
            optimizer=dataclasses.replace(OPTIMIZER, cpu_offload=cpu_offload),
            trainer=TrainerConfig(device="cpu"),
            algorithm=ALGORITHM,
        )

    backend = await asyncio.get_running_loop().run_in_executor(thread, load)
    runner = ModelRunner(
        RankModels(backend, algorithm=ALGORITHM), make(backend), thread, engine_dtype="bfloat16"
    )
    try:
        yield runner
    finally:
        await runner.close()


def command(step: int) -> TrainCommand:
    samples = [SampleSpec([5, 6, 7, 8], [step] * 4, 1.0), SampleSpec([9, 10], [step] * 2)]
    return train_command(step, [encode_payload(scored(GroupSpec(group=step, samples=samples)))])


def before_chunk(runner: ModelRunner, number: int, action: object) -> None:
    """Do something in the step, before the optimizer steps a chunk of the model."""
    chunks = iter(range(10**6))
    adam = runner.executor.models.policy._optimizer._adam  # type: ignore[attr-defined]
    adam.register_step_pre_hook(lambda *_: action() if next(chunks) == number else None)  # type: ignore[operator]


async def test_a_version_is_published_while_the_optimizer_makes_it(model_dir: Path) -> None:
    drafts = list[WeightDraft]()
    seen: list[bool] = []
    async with opened(model_dir, SeenSender) as runner:
        first = await runner.publish("e", 1)
        sender = cast(SeenSender, runner.sender)
        sender.has_one.clear()
        before_chunk(runner, 2, lambda: seen.append(sender.has_one.wait(60)))
        _, stats = await runner.train(command(1), epoch="e", announce=drafts.append)
        assert (stats.skipped, seen) == ("", [True])
        assert await runner.provisional("e", 2) is None  # it was announced in the step
        made = await runner.publish("e", 2)
        assert drafts == [WeightDraft(epoch="e", version=2, like=1)]
        assert made.digest != first.digest
        again = await runner.publish("e", 3)
        assert (made.digest, made.tensors) == (again.digest, again.tensors)


class HeardExecutor(Executor):
    """Rank 0 that says when the others have heard from it twice."""

    def __init__(self, models: RankModels) -> None:
        super().__init__(models)
        self.heard, self._times = threading.Event(), 0

    def lead(self, command: RankCommand[Any]) -> Any:
        super().lead(command)
        self._times += isinstance(command, IdleCommand)
        if self._times == 2:
            self.heard.set()


async def test_other_ranks_hear_from_rank_0_while_it_waits_for_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_runner, "IDLE_S", 0.0)
    models = RankModels(ScriptedBackend(trainer=TrainerConfig()))
    runner = ModelRunner(models, SeenSender(models.policy), ThreadPoolExecutor(1), engine_dtype="float32")
    runner.executor = leader = HeardExecutor(models)
    async with asyncio.TaskGroup() as tasks:
        idle = tasks.create_task(runner.idle_loop())
        assert await asyncio.to_thread(leader.heard.wait, 60)  # a checkpoint that is written, say
        idle.cancel()
    await runner.close()


async def test_flops_of_all_epochs_leave_out_tokens_that_are_computed_once(model_dir: Path) -> None:
    async with opened(model_dir, SeenSender) as runner:
        plan, _ = await runner.train(command(0))
        policy, shared = runner.executor.models.policy, plan.shared_tokens(plan.families(shared=True))
        rows, once = (
            policy.flops(plan.lengths, tokens, plan.totals.trained_tokens)
            for tokens in (torch.zeros_like(shared), shared)
        )
        assert rows is not None
        assert once is not None
        assert shared.any()
        assert once < rows
        assert [runner.flops(plan, epochs) for epochs in (1, 3)] == [once, 3 * once]


async def test_steps_in_a_row_publish_each_its_own_weights(model_dir: Path, tmp_path: Path) -> None:
    found: dict[bool, list[int]] = {}
    for ahead in (True, False):
        config = WeightConfig(directory=str(tmp_path / str(ahead)))
        async with opened(model_dir, partial(_on_disk, config), cpu_offload=ahead) as runner:
            found[ahead] = []
            for number in range(3):
                await runner.train(command(number), epoch="e", announce=lambda draft: None)
                assert (runner._early_publication is not None) is ahead
                found[ahead].append((await runner.publish("e", number + 1)).digest)
    assert found[True] == found[False]
    assert len(set(found[True])) == 3


async def test_a_skipped_step_begins_nothing_and_its_version_has_the_weights_before(
    model_dir: Path, tmp_path: Path
) -> None:
    sender = disk_sender(WeightConfig(directory=str(tmp_path / "weights")), tmp_path)
    async with opened(model_dir, lambda _: sender) as runner:
        with torch.no_grad():
            weight = next(iter(runner.executor.models.policy._parameters.values()))  # type: ignore[attr-defined]
            weight[5] = torch.inf  # so that no gradient is finite
        before = await runner.publish("e", 0)
        drafts = list[WeightDraft]()
        _, stats = await runner.train(command(0), epoch="e", announce=drafts.append)
        assert stats.skipped.startswith("overflow")
        assert runner._early_publication is None
        assert (await runner.publish("e", 1)).digest == before.digest
        assert drafts == []


async def test_a_step_that_fails_in_the_middle_publishes_nothing(model_dir: Path, tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError("no more memory")

    directory = tmp_path / "weights"
    sender = disk_sender(WeightConfig(directory=str(directory)), tmp_path)
    async with opened(model_dir, lambda _: sender) as runner:
        before_chunk(runner, 2, fail)
        with pytest.raises(OSError, match="no more memory"):
            await runner.train(command(0), epoch="e", announce=lambda draft: None)
        with pytest.raises(WeightError, match="the optimizer's step has failed"):
            await runner.publish("e", 1)
        assert list(directory.glob("v*")) == []


async def test_a_replayed_step_is_not_published(model_dir: Path, tmp_path: Path) -> None:
    sender = disk_sender(WeightConfig(directory=str(tmp_path / "weights")), tmp_path)
    async with opened(model_dir, lambda _: sender) as runner:
        await runner.train(command(0), epoch="e", announce=lambda draft: None)
        await runner.publish("e", 1)
        await runner.train(command(1))
        assert runner._early_publication is None
        assert len(list((tmp_path / "weights").glob("v*"))) == 1
