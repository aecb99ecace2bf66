"""Defines faults of the trainer: batch, gradient, optimizer, checkpoint, publication."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from tests.trials.silent.faults import fault
from tests.trials.silent.world import World
from trainer.batch import Batch
from trainer.config import OptimizerConfig
from trainer.data.samples import BatchSample
from trainer.execution.commands import FinishSaveCommand, RestoreCommand, SaveCommand

DECAY = OptimizerConfig(lr=2e-3, weight_decay=0.2)


def policy_of(world: World) -> Any:
    """Return the trainer's backend."""
    return world.executor.models.policy


def before_optimizer(world: World, change: Any) -> None:
    """Call `change` on the optimizer before each of its steps."""
    optimizer = policy_of(world)._stepper.optimizer
    step = optimizer.step

    def changed() -> Any:
        change(optimizer)
        return step()

    optimizer.step = changed


@fault("training that changes nothing", "no_op", "update")
def no_op(world: World) -> None:
    policy_of(world)._stepper.optimizer.step = lambda: None


@fault("weight decay on norms", "update", sections={"optimizer": DECAY})
def decay(world: World) -> None:
    def change(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["weight_decay"] = DECAY.weight_decay

    before_optimizer(world, change)


@fault("learning rate of another group", "update")
def rate(world: World) -> None:
    def change(optimizer: Any) -> None:
        optimizer.param_groups[-1]["lr"] *= 3

    before_optimizer(world, change)


@fault("gradient of one micro-batch lost", "gradient", "update")
def lost_micro_batch(world: World) -> None:
    policy = policy_of(world)
    train, accumulate, made = policy.train_step, policy._accumulate, [0]

    def train_step(batch: Batch) -> Any:
        made[0] = 0
        return train(batch)

    def lossy(part: Batch, measures: Any) -> Any:
        vector, made[0] = accumulate(part, measures), made[0] + 1
        if made[0] == 1:
            policy._stepper.optimizer.zero_grad()
        return vector

    policy.train_step, policy._accumulate = train_step, lossy


@fault("one rank's gradient of a tensor not reduced", "gradient", "update")
def not_reduced(world: World) -> None:
    """Leave the gradient of one tensor as the first micro-batch made it, as a rank alone would have it."""
    policy = policy_of(world)
    train, accumulate = policy.train_step, policy._accumulate
    name = "model.layers.1.self_attn.o_proj.weight"
    first: list[torch.Tensor] = []

    def train_step(batch: Batch) -> Any:
        first.clear()
        return train(batch)

    def lossy(part: Batch, measures: Any) -> Any:
        vector, master = accumulate(part, measures), policy._masters[name]
        if not first:
            first.append(master.grad.clone())
        master.grad = first[0].clone()
        return vector

    policy.train_step, policy._accumulate = train_step, lossy


@fault("loss counted twice", "loss", "gradient")
def doubled_loss(world: World) -> None:
    change_batch(world, lambda batch: dataclasses.replace(batch, weights=batch.weights * 2))


@fault("behaviour log-probabilities of the next token", "loss", "gradient", "update")
def behaviour(world: World) -> None:
    def change(batch: Batch) -> Batch:
        return dataclasses.replace(batch, behaviour_logprobs=batch.behaviour_logprobs.roll(1))

    change_batch(world, change)


def change_batch(world: World, change: Any) -> None:
    """Change each batch that the backend is given."""
    policy = policy_of(world)
    train = policy.train_step
    policy.train_step = lambda batch: train(change(batch))


@fault("advantages of the neighbour", "advantage")
def advantages(world: World) -> None:
    kind: Any = type(world.executor.models.algorithm)
    right = kind.advantages
    kind.advantages = lambda self, rewards, index: right(self, rewards, index).roll(1)
    world.undo.append(lambda: setattr(kind, "advantages", right))


@fault("last token of each sample not trained", "mask")
def short_mask(world: World) -> None:
    """Leave the last token out of the arrays that the trainer makes of a record."""
    right = BatchSample.token_arrays

    def arrays(self: BatchSample, step: int) -> dict[str, Any]:
        found = right(self, step)
        found["loss_mask"] = found["loss_mask"] & (np.arange(len(self)) < len(self) - 1)
        return found

    BatchSample.token_arrays = arrays  # type: ignore[method-assign]
    world.undo.append(lambda: setattr(BatchSample, "token_arrays", right))


@fault("checkpoint of another step", "update", delay=2)
def checkpoint(world: World) -> None:
    """Load the checkpoint of the present version two steps later."""
    directory = world.settings.run_dir / "old"
    directory.mkdir()
    executor, train, made = world.executor, world.executor.train, [0]
    executor.lead(SaveCommand(str(directory)))
    executor.await_part()
    assert not executor.lead(FinishSaveCommand())

    def trained(command: Any, begin: Any = None) -> Any:
        made[0] += 1
        if made[0] == 3:
            executor.lead(RestoreCommand(str(directory)))
        return train(command, begin)

    executor.train = trained  # type: ignore[method-assign]


@fault("one published tensor of the version before", "published")
def old_published(world: World) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    kept = dict[str, torch.Tensor]()

    def change(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for found, tensor in tensors:
            if found == name:
                old, kept[name] = kept.get(name, tensor), tensor.clone()
                yield found, old
            else:
                yield found, tensor

    world.publish = change
