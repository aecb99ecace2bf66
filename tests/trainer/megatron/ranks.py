"""Runs everything that needs one layout in one launch, a rank each; rank 0 writes down the results."""

import faulthandler
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from safetensors.torch import save_file

from protocol.errors import WeightError
from rollout.staging.staging import digest_of
from services.audit.versions import read_version
from tests.trainer.checkpoints import save_part
from tests.trainer.exports import export_by_rank
from tests.trainer.measured import flat
from tests.trainer.megatron.launch import DEADLINE_S
from tests.trainer.megatron.layouts import (
    EXPERT_LAYOUTS,
    FROM,
    LAYOUTS,
    models_of,
    one_of,
    restored_in,
    tied_model_of,
)
from tests.trainer.megatron.models import (
    BALANCE,
    OPTIMIZER,
    make_batch,
    step_batch,
)
from tests.trainer.megatron.routed import routed_batch
from tests.trainer.megatron.trees import make_tree
from tests.trainer.weights.served.trainer_ranks import EngineRank, tensor_ranks
from trainer.algorithms.grpo import Grpo
from trainer.algorithms.gspo import Gspo
from trainer.backends.base import Backend
from trainer.batch import Batch
from trainer.config import AlgorithmConfig, TrainerConfig, WeightConfig
from trainer.data.packing import balance
from trainer.fsdp.backend import FsdpBackend
from trainer.megatron import cpu, parallel
from trainer.megatron.backend import MegatronBackend
from trainer.megatron.forward import PlannedShapes, ReceivedShapes
from trainer.reference.shards import local_tensor
from trainer.step.loss import micro_batch_loss
from trainer.step.measures import StepMeasures
from trainer.weights.part_layout import blank_manifest
from trainer.weights.publish import publish, published
from trainer.weights.registry import make_sender
from trainer.weights.served.sender import PartSender

OVERFLOWS = 2.0**24
"""A factor of the loss under which the gradients of these models overflow in float16."""
STEPS = 3
FRESH = ("qwen2", "qwen3-moe", "qwen3-deep")
"""Models whose checkpoint is restored into a new backend; others restore into the one that continued."""
ALGORITHM = Grpo(AlgorithmConfig(entropy_coef=0.02, kl_coef=0.0))
BY_SAMPLE = Gspo(
    AlgorithmConfig(name="gspo", rejection_level="sequence", rejection_low=0.05, rejection_high=1e3)
)
"""A recipe for which context ranks have to add up over their parts of each sample."""


def make_backend(
    model_dir: Path,
    layout: str,
    dtype: str = "float32",
    *,
    routing_replay: bool = False,
    **changes: object,
) -> MegatronBackend:
    """`changes`: of the layout."""
    trainer = TrainerConfig(
        micro_batch_tokens=40,
        micro_batch_size=7,
        dtype=dtype,
        device="cpu",
        routing_replay=routing_replay,
        **({} if routing_replay else BALANCE.get(model_dir.name, {})),
    )
    return MegatronBackend(
        model_dir,
        parallel=replace(LAYOUTS[layout], **changes),  # type: ignore[arg-type]
        optimizer=replace(OPTIMIZER, initial_loss_scale=OVERFLOWS),
        trainer=trainer,
        algorithm=ALGORITHM,
    )


def cut(backend: Backend, batch: Batch) -> list[torch.Tensor]:
    """The samples of each replica."""
    pieces = balance(backend.costs(batch.lengths).tolist(), len(backend.replicas))
    return [torch.tensor(piece, dtype=torch.int64) for piece in pieces]


def replica_of(backend: Backend) -> int:
    rank = dist.get_rank()
    return next(index for index, ranks in enumerate(backend.replicas) if rank in ranks)


def part_of(backend: Backend, batch: Batch) -> Batch:
    """What this rank's replica works on."""
    return batch.select(cut(backend, batch)[replica_of(backend)])


def whole(backend: Backend, batch: Batch, logprobs: Callable[[Batch], torch.Tensor]) -> torch.Tensor:
    """The log-probabilities of all replicas as each rank has them, [ranks, t]."""
    samples, ranks = cut(backend, batch)[replica_of(backend)], dist.get_world_size()
    found = torch.zeros(ranks, len(batch.tokens))
    mine = torch.isin(batch.sample_index, samples)
    found[dist.get_rank(), mine] = logprobs(batch.select(samples))
    dist.all_reduce(found)
    return found


@contextmanager
def joined(layout: str) -> Iterator[None]:
    """Let all backends of the block share the process groups of the first: the threads of two dozen groups
    stay until Python's collector finds them, and slow down what comes next."""
    cpu.install()
    parallel.initialize(LAYOUTS[layout], "cpu", 0)
    try:
        yield
    finally:
        parallel.finalize()


def run(layout: str, models: Path, out: Path) -> None:
    """All models of `models` under one layout."""
    torch.set_num_threads(1)
    with joined(layout):
        _run(layout, models, out)


def _run(layout: str, models: Path, out: Path) -> None:
    if LAYOUTS[layout].virtual_pipeline_model_parallel_size > 1:
        out.mkdir(parents=True, exist_ok=True)
        _exchange_in_both_directions(layout, models / tied_model_of(layout), out)
    for name in models_of(layout):
        target = out / name
        target.mkdir(parents=True, exist_ok=True)
        train_and_restore(name, partial(make_backend, models / name, layout), models / name, target)
    _one_by_one(layout, models)
    for dtype in ("bfloat16", "float16"):
        _sixteen_bits(dtype, layout, models, out / dtype)
    if layout in EXPERT_LAYOUTS or layout == "single":
        _replay(layout, models / "qwen3-moe", out)
    if LAYOUTS[layout].context_parallel_size > LAYOUTS[layout].expert_model_parallel_size:
        _by_sample(layout, models, out)
    for source in FROM.get(layout, ()):
        restore_from(source, layout, models, out)


def train_and_restore(name: str, make: Callable[[], Backend], model_dir: Path, out: Path) -> None:
    """Train three steps with a backend, save, publish, restore and train again."""
    backend = make()
    backend.keep_reference()
    before = make_batch(name, 0)
    write(out / "before", backend.export())
    write(out / "logprobs", [("first", whole(backend, before, backend.logprobs))])
    stats = []
    for step in range(STEPS):
        stats.append(flat(backend.train_step(part_of(backend, step_batch(name, step)))))
        if step == 0:
            checkpoint = checkpoint_in(backend, out / "after-one")
    write(out / "after", backend.export())
    if isinstance(backend, MegatronBackend):
        _write_held(backend, out / "held")
    if len(backend.publication.parts) > 1:
        publish_pieces(backend, out)
    write(
        out / "reference",
        [
            ("first", whole(backend, before, backend.reference_logprobs)),
            ("now", whole(backend, before, backend.logprobs)),
        ],
    )
    export_by_rank(backend, out / "hf", model_dir)
    if name in FRESH:
        backend.close()
        backend = make()
    backend.restore(checkpoint)
    write(out / "restored", _go_on(backend, name, by_turns=True))
    backend.close()
    if _is_writer():
        (out / "stats.json").write_text(json.dumps(stats))


def publish_pieces(backend: Backend, out: Path) -> None:
    """Publish from all ranks, by either transport, to an engine of two tensor ranks that rank 0 plays."""
    exported = dict(published(backend, "float32"))
    shapes = dict(zip(backend.publication.names, backend.publication.shapes, strict=True))
    for version, transport in enumerate(("ipc", "nccl"), 1):
        config = WeightConfig(transport=transport, backend="gloo", bucket_mb=1, timeout_s=DEADLINE_S)
        blank = blank_manifest(backend.publication, "float32", 1 << 20, transport)
        sender = PartSender(config, dist.get_rank(), blank)
        manifest = publish(backend, sender, "e1", version, "float32")
        if dist.get_rank() == 0:
            assert manifest.digest == digest_of(exported)
            engines = [EngineRank(boxes, shapes) for boxes in tensor_ranks(shapes, 2)]
            for engine in engines:
                engine.fetch(manifest)
                assert engine.staging.take(manifest).digest == manifest.digest
                assert engine.holds(exported)
                engine.staging.close()
        dist.barrier()
        sender.close()
    if _is_writer():
        (out / "published.json").write_text(
            json.dumps({"tensors": len(exported), "parts": len(manifest.parts)})
        )
    _publish_files(backend, out, exported)


def _publish_files(backend: Backend, out: Path, exported: dict[str, torch.Tensor]) -> None:
    """Publish to files that all ranks write, also after a version that could not be published."""
    config, rank = WeightConfig(transport="disk", directory=str(out / "files"), bucket_mb=1), dist.get_rank()
    sender = make_sender(config, backend, "float32", run="ranks", run_dir=out, rank=rank)
    assert sender is not None
    if rank == 0:
        (out / "files").rename(out / "moved")
        (out / "files").touch()
        with pytest.raises(WeightError, match=r"version 1 in .*files"):
            publish(backend, sender, "e1", 1, "float32")
        (out / "files").unlink()
        (out / "moved").rename(out / "files")
    else:
        publish(backend, sender, "e1", 1, "float32")
    pieces = list(published(backend, "float32", in_parts=True))
    if rank == 1:
        sender.publish("e1", 2, pieces[1:])
    elif rank == 0:
        with pytest.raises(WeightError, match="version 2: rank 1: the export has"):
            sender.publish("e1", 2, pieces)
    else:
        sender.publish("e1", 2, pieces)
    manifest = publish(backend, sender, "e1", 3, "float32")
    if rank == 0:
        assert manifest is not None
        assert manifest.digest == digest_of(exported)
        assert [path.name for path in (out / "files").iterdir()] == ["v00000003-e1"]
        found = read_version(manifest, DEADLINE_S)
        assert found.keys() == exported.keys()
        assert all(torch.equal(found[name], exported[name].float()) for name in found)
    sender.close()


def _go_on(backend: Backend, name: str, *, by_turns: bool = False) -> Iterable[tuple[str, torch.Tensor]]:
    """`by_turns`: the device is free between two steps."""
    for step in range(1, STEPS):
        backend.train_step(part_of(backend, step_batch(name, step)))
        if by_turns:
            backend.offload()
            held = list(_on_device(backend))
            assert held
            assert [tuple(tensor.shape) for tensor in held if tensor.untyped_storage().nbytes() > 8] == []
            backend.onload()
    return backend.export()


def _on_device(backend: Backend) -> Iterable[torch.Tensor]:
    """The parameters, masters and moments of a rank."""
    if isinstance(backend, MegatronBackend):
        return [*backend._parameters.values(), *backend._optimizer.tensors()]
    assert isinstance(backend, FsdpBackend)
    return map(local_tensor, (*backend._model.module.parameters(), *backend._stepper.tensors()))


def _one_by_one(layout: str, models: Path) -> None:
    """Loss, gradient and log-probabilities of packed samples are those of each sample alone.

    Tokens that samples of a group begin with are computed once. Sums in another order differ by 1e-6.
    """
    # A distributed optimizer leaves a rank most gradients without those of the other context ranks.
    name = one_of(layout)
    backend = make_backend(models / name, layout, use_distributed_optimizer=False)
    batch = make_tree(name, 0)
    batch = batch.select(groups_of(backend, batch))
    packed, alone = _pass(backend, batch, samples=7), _pass(backend, batch, samples=1)
    for name, expected in alone.items():
        scale = max(1.0, expected.abs().max().item())
        torch.testing.assert_close(packed[name] / scale, expected / scale, atol=2e-6, rtol=0, msg=name)
    backend.close()


def groups_of(backend: Backend, batch: Batch) -> torch.Tensor:
    """The samples of this rank's replica, where groups stay together."""
    return (batch.group_index % len(backend.replicas) == replica_of(backend)).nonzero()[:, 0]


def _pass(backend: MegatronBackend, batch: Batch, *, samples: int) -> dict[str, torch.Tensor]:
    """What a forward and backward pass gives, with so many samples in a micro-batch."""
    backend._optimizer.zero_grad()
    backend._runner.micro_batch_size = samples
    measures = StepMeasures.of_batch(batch, ALGORITHM.config)
    found = backend._runner.train(batch, partial(micro_batch_loss, ALGORITHM, measures), measures)
    assert found.micro_batches >= len(batch.lengths) // samples
    assert found.shared_share > 0.2 if samples > 1 else found.shared_share == 0
    stepped = {name: p for name, p in backend._parameters.items() if p.requires_grad}
    gradients = {name: parameter.main_grad.clone() for name, parameter in stepped.items()}
    return {"measures": found.vector, "logprobs": backend.logprobs(batch), **gradients}


def _replay(layout: str, model_dir: Path, out: Path) -> None:
    """Log-probabilities and gradient norm with experts that no router would choose."""
    backend = make_backend(model_dir, layout, routing_replay=True)
    batch = routed_batch("qwen3-moe")
    logprobs = whole(backend, batch, backend.logprobs)
    stats = backend.train_step(part_of(backend, batch))
    write(out / "replayed", [("logprobs", logprobs), ("grad_norm", torch.tensor(stats.grad_norm))])
    backend.close()


def _by_sample(layout: str, models: Path, out: Path) -> None:
    """Loss and gradient norm of a recipe whose ratios and rejections are of whole samples."""
    name = one_of(layout)
    backend = make_backend(models / name, layout)
    backend.algorithm = BY_SAMPLE
    stats = backend.train_step(part_of(backend, make_batch(name, 0)))
    backend.close()
    if _is_writer():
        found = [stats.loss, stats.grad_norm, stats.ratio_mean, stats.importance_rejected]
        (out / "by-sample.json").write_text(json.dumps(found))


def _sixteen_bits(dtype: str, layout: str, models: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    name = one_of(layout)
    backend = make_backend(models / name, layout, dtype)
    write(out / "before", backend.export())
    stats = backend.train_step(part_of(backend, step_batch(name, 0)))
    if _is_writer():
        (out / "scale.json").write_text(json.dumps([stats.loss_scale, stats.loss_scale_repeats]))
    checkpoint = checkpoint_in(backend, out / "after-one")
    write(out / "after", _go_on(backend, name))
    backend.restore(checkpoint)
    write(out / "restored", _go_on(backend, name, by_turns=True))
    backend.close()


def _exchange_in_both_directions(layout: str, model_dir: Path, out: Path) -> None:
    """A stage sends an activation and a gradient at once, and receives both."""
    backend = make_backend(model_dir, layout)
    groups, shape = ProcessGroupCollection.use_mpu_process_groups(), (3, 1, 4)
    messages = PlannedShapes(groups.pp, backend._part.config, ReceivedShapes([shape], [shape]))
    activation, gradient = (torch.full(shape, kind + groups.pp.rank()) for kind in (10.0, 20.0))
    received = messages.send_forward_backward_recv_forward_backward(activation, gradient, True, True, shape)
    backend.close()
    if _is_writer():
        (out / "exchange.json").write_text(json.dumps([tensor.unique().tolist() for tensor in received]))


def restore_from(source: str, layout: str, models: Path, out: Path) -> None:
    """Restore what another layout saved after a step; save it at once, and continue."""
    for directory, (dtype, name) in restored_in(source, layout).items():
        target = out / directory / f"from-{source}"
        backend = make_backend(models / name, layout, dtype)
        backend.restore(out.parent / source / directory / "after-one")
        checkpoint_in(backend, target)
        write(target.with_name(f"went-on-from-{source}"), _go_on(backend, name))
        backend.close()


def checkpoint_in(backend: Backend, directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    save_part(backend, directory)
    return directory


def write(path: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    content = dict(tensors)
    if content and _is_writer():
        save_file(content, path.with_suffix(".safetensors"))


def _write_held(backend: MegatronBackend, directory: Path) -> None:
    """What each rank holds, in a file of its own."""
    directory.mkdir(parents=True, exist_ok=True)
    held = {name: tensor.detach().clone() for name, tensor in backend._parameters.items()}
    save_file(held, directory / f"rank{backend.position.rank}.safetensors")
    if dist.is_initialized():
        dist.barrier()


def _is_writer() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


if __name__ == "__main__":
    faulthandler.dump_traceback_later(DEADLINE_S - 20, exit=True)
    run(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
