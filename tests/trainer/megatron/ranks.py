"""Runs everything that needs one layout in one launch, a rank each; rank 0 writes down the results."""

import faulthandler
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from protocol.errors import SettingsError
from tests.trainer.measured import flat
from tests.trainer.megatron.launch import DEADLINE_S
from tests.trainer.megatron.models import (
    BALANCE,
    MODELS,
    MORE_MODELS,
    OPTIMIZER,
    make_batch,
    routed_batch,
    step_batch,
)
from trainer.algorithms.grpo import Grpo
from trainer.backends.base import Backend
from trainer.backends.hf_export import write_hf
from trainer.backends.step_measures import StepMeasures
from trainer.batch import Batch
from trainer.config import AlgorithmConfig, ParallelConfig, TrainerConfig
from trainer.data.packing import balance
from trainer.megatron.backend import MegatronBackend
from trainer.storage.host_state import HostCopies

LAYOUTS = {
    "single": ParallelConfig(),
    "tp2": ParallelConfig(tensor_model_parallel_size=2),
    "tp2-sequence": ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True),
    "pp2": ParallelConfig(pipeline_model_parallel_size=2),
    "dp2": ParallelConfig(data_parallel_size=2),
    "dp2-replicated": ParallelConfig(data_parallel_size=2, use_distributed_optimizer=False),
    "tp2-pp2": ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2),
    "tp2-dp2": ParallelConfig(tensor_model_parallel_size=2, data_parallel_size=2),
}
EXPERT_LAYOUTS = {
    "ep2": ParallelConfig(data_parallel_size=2, expert_model_parallel_size=2),
    "etp2": ParallelConfig(
        tensor_model_parallel_size=2, sequence_parallel=True, expert_tensor_parallel_size=2
    ),
    "tp2-ep2": ParallelConfig(
        tensor_model_parallel_size=2, sequence_parallel=True, expert_model_parallel_size=2
    ),
    "ep2-pp2": ParallelConfig(
        pipeline_model_parallel_size=2, data_parallel_size=2, expert_model_parallel_size=2
    ),
    "tp2-dp2-ep2": ParallelConfig(
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        data_parallel_size=2,
        expert_model_parallel_size=2,
    ),
    "ep2-etp2-replicated": ParallelConfig(
        data_parallel_size=4,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=2,
        use_distributed_optimizer=False,
    ),
}
"""Only models with experts are trained in them."""
LAYOUTS |= EXPERT_LAYOUTS
LATENT = ("deepseek-v3-dense", "deepseek-v2-dense", "deepseek-v3")
WINDOWS = ("gemma2", "gemma3", "glm4", "starcoder2", "qwen3-windows")
MORE_MODELS_OF = {
    "single": tuple(MORE_MODELS),
    "tp2": ("deepseek-v3-dense",),
    "tp2-sequence": ("mistral", "olmo2", "phi3", "qwen2-moe", "glm4-moe", "gpt-oss", *WINDOWS, *LATENT),
    "pp2": ("gemma2",),
}
STEPS = 3
FRESH = ("qwen2", "qwen3-moe")
"""Models whose checkpoint is restored into a new backend; others restore into the one that continued."""
EXPERTS = ("qwen3-moe", "mixtral", "qwen2-moe", "deepseek-v3", "gpt-oss")
"""Models with experts."""
ALGORITHM = Grpo(AlgorithmConfig(entropy_coef=0.02, kl_coef=0.0))


def make_backend(
    model_dir: Path, layout: str, dtype: str = "float32", *, routing_replay: bool = False
) -> MegatronBackend:
    trainer = TrainerConfig(
        micro_batch_tokens=40,
        micro_batch_size=7,
        dtype=dtype,
        device="cpu",
        routing_replay=routing_replay,
        **BALANCE.get(model_dir.name, {}),
    )
    return MegatronBackend(
        model_dir, parallel=LAYOUTS[layout], optimizer=OPTIMIZER, trainer=trainer, algorithm=ALGORITHM
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


def drain(backend: Backend) -> dict[str, torch.Tensor]:
    return dict(backend.export())


def models_of(layout: str) -> list[str]:
    """Names of the models that are trained in a layout."""
    if layout in EXPERT_LAYOUTS:
        return [*EXPERTS] if LAYOUTS[layout].world_size > 2 else [*EXPERTS[:2]]
    return [*MODELS, *MORE_MODELS_OF.get(layout, ())]


def one_of(layout: str) -> str:
    """Name of the model that is trained in other ways, too."""
    return "qwen3-moe" if layout in EXPERT_LAYOUTS else "qwen3-tied"


def run(layout: str, models: Path, out: Path) -> None:
    """All models of `models` under one layout."""
    torch.set_num_threads(1)
    for name in models_of(layout):
        target = out / name
        target.mkdir(parents=True, exist_ok=True)
        _train_and_restore(name, layout, models / name, target)
    _one_by_one(layout, models)
    _bfloat16(layout, models, out / "bfloat16")
    if layout in EXPERT_LAYOUTS or layout == "single":
        _replay(layout, models / "qwen3-moe", out)
    if layout == "single":
        return
    _refuse_other_layout(layout, models, out)


def _train_and_restore(name: str, layout: str, model_dir: Path, out: Path) -> None:
    backend = make_backend(model_dir, layout)
    backend.keep_reference()
    before = make_batch(name, 0)
    _write(out / "before", backend.export())
    _write(out / "logprobs", [("first", whole(backend, before, backend.logprobs))])
    stats = []
    for step in range(STEPS):
        stats.append(flat(backend.train_step(part_of(backend, step_batch(name, step)))))
        if step == 0:
            checkpoint = _checkpoint(backend, out / "after-one")
    _write(out / "after", backend.export())
    _checkpoint(backend, out / "at-end")
    _write(
        out / "reference",
        [
            ("first", whole(backend, before, backend.reference_logprobs)),
            ("now", whole(backend, before, backend.logprobs)),
        ],
    )
    model = HostCopies().copy_all(backend.export_model())
    if model:  # on rank 0
        write_hf(iter(model.items()), out / "hf", model_dir, 50_000)
    if name in FRESH:
        backend.close()
        backend = make_backend(model_dir, layout)
    backend.restore(checkpoint)
    _write(out / "restored", _go_on(backend, name, by_turns=True))
    backend.close()
    if _is_writer():
        (out / "stats.json").write_text(json.dumps(stats))


def _go_on(
    backend: MegatronBackend, name: str, *, by_turns: bool = False
) -> Iterable[tuple[str, torch.Tensor]]:
    """`by_turns`: the device is free between two steps."""
    for step in range(1, STEPS):
        backend.train_step(part_of(backend, step_batch(name, step)))
        if by_turns:
            backend.offload()
            held = [*backend._parameters.values(), *backend._optimizer.tensors()]
            assert [tuple(tensor.shape) for tensor in held if tensor.untyped_storage().nbytes()] == []
            backend.onload()
    return backend.export()


def _one_by_one(layout: str, models: Path) -> None:
    """Loss, gradient and log-probabilities of packed samples are those of each sample alone."""
    name = one_of(layout)
    backend = make_backend(models / name, layout)
    batch = part_of(backend, make_batch(name, 0))
    packed, alone = _pass(backend, batch, samples=7), _pass(backend, batch, samples=1)
    for name, expected in alone.items():
        scale = max(1.0, expected.abs().max().item())
        torch.testing.assert_close(packed[name] / scale, expected / scale, atol=1e-6, rtol=0, msg=name)
    backend.close()


def _pass(backend: MegatronBackend, batch: Batch, *, samples: int) -> dict[str, torch.Tensor]:
    """What a forward and backward pass gives, with so many samples in a micro-batch."""
    backend._optimizer.zero_grad(backend._model)
    backend._runner.micro_batch_size = samples
    measures = StepMeasures.of_batch(batch, ALGORITHM.config)
    vector, micro_batches, _ = backend._runner.train(batch, ALGORITHM, measures)
    assert micro_batches >= len(batch.lengths) // samples
    stepped = {name: p for name, p in backend._parameters.items() if p.requires_grad}
    gradients = {name: parameter.main_grad.clone() for name, parameter in stepped.items()}
    return {"measures": vector, "logprobs": backend.logprobs(batch), **gradients}


def _replay(layout: str, model_dir: Path, out: Path) -> None:
    """Log-probabilities and gradient norm with experts that no router would choose."""
    backend = make_backend(model_dir, layout, routing_replay=True)
    batch = routed_batch("qwen3-moe")
    logprobs = whole(backend, batch, backend.logprobs)
    stats = backend.train_step(part_of(backend, batch))
    _write(out / "replayed", [("logprobs", logprobs), ("grad_norm", torch.tensor(stats.grad_norm))])
    backend.close()


def _bfloat16(layout: str, models: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    name = one_of(layout)
    backend = make_backend(models / name, layout, "bfloat16")
    _write(out / "before", backend.export())
    backend.train_step(part_of(backend, step_batch(name, 0)))
    checkpoint = _checkpoint(backend, out / "after-one")
    _write(out / "after", _go_on(backend, name))
    backend.restore(checkpoint)
    _write(out / "restored", _go_on(backend, name, by_turns=True))
    backend.close()


def _refuse_other_layout(layout: str, models: Path, out: Path) -> None:
    """The checkpoint of the test process's own single rank."""
    name = "qwen3-moe" if layout in EXPERT_LAYOUTS else "qwen2"
    backend = make_backend(models / name, layout)
    kept = drain(backend)
    try:
        backend.restore(out.parent / "single" / name / "after-one")
        message = "nothing was raised"
    except SettingsError as error:
        message = str(error)
    same = all(torch.equal(kept[name], tensor) for name, tensor in backend.export())
    backend.close()
    if _is_writer():
        (out / "refused.json").write_text(json.dumps({"message": message, "unchanged": same}))


def _checkpoint(backend: Backend, directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(directory)
    return directory


def _write(path: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    content = dict(tensors)
    if content and _is_writer():
        save_file(content, path.with_suffix(".safetensors"))


def _is_writer() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


if __name__ == "__main__":
    faulthandler.dump_traceback_later(DEADLINE_S - 20, exit=True)
    run(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
