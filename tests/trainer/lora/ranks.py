"""Runs one rank of a layout in the adapter tests; rank 0 writes down the results."""

import faulthandler
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from protocol.weights.lora import LoraConfig
from tests.trainer.checkpoints import save_part
from tests.trainer.exports import export_by_rank
from tests.trainer.lora.oracle import ALGORITHM, LORA, STEPS
from tests.trainer.megatron.launch import DEADLINE_S
from tests.trainer.megatron.layouts import LAYOUTS
from tests.trainer.megatron.models import OPTIMIZER, make_batch
from tests.trainer.megatron.ranks import part_of
from trainer.config import TrainerConfig
from trainer.megatron.backend import MegatronBackend


def make_backend(
    name: str, model_dir: Path, layout: str, adapters: LoraConfig = LORA, **settings: object
) -> MegatronBackend:
    trainer = TrainerConfig(**{"micro_batch_size": 7, "device": "cpu", **settings})  # type: ignore[arg-type]
    return MegatronBackend(
        model_dir,
        parallel=LAYOUTS[layout],
        optimizer=OPTIMIZER,
        trainer=trainer,
        algorithm=ALGORITHM,
        adapters=adapters,
    )


def run(layout: str, name: str, model_dir: Path, out: Path, dropout: float = 0.0) -> None:
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    backend = make_backend(name, model_dir, layout, replace(LORA, dropout=dropout))
    backend.keep_reference()
    before = backend.logprobs(part_of(backend, make_batch(name, 0)))
    losses = []
    for step in range(STEPS):
        losses.append(backend.train_step(part_of(backend, make_batch(name, step))).loss)
        if step == 0:
            (out / "after-one").mkdir(exist_ok=True)
            save_part(backend, out / "after-one")
    after = dict(backend.export())
    export_by_rank(backend, out / "hf", model_dir)
    reference = backend.reference_logprobs(part_of(backend, make_batch(name, 0)))
    backend.restore(out / "after-one")
    for step in range(1, STEPS):
        backend.train_step(part_of(backend, make_batch(name, step)))
    again = dict(backend.export())
    moved = _moved(backend, name, out)
    backend.close()
    if not dist.is_initialized() or dist.get_rank() == 0:
        save_file(after, out / "after.safetensors")
        save_file(again, out / "again.safetensors")
        save_file(moved, out / "moved.safetensors")
        (out / "facts.json").write_text(
            json.dumps({"losses": losses, "reference": torch.equal(reference, before)})
        )


def _moved(backend: MegatronBackend, name: str, out: Path) -> dict[str, torch.Tensor]:
    """The adapter after the steps that follow the single rank's checkpoint."""
    backend.restore(out.parent / "single" / "after-one")
    for step in range(1, STEPS):
        backend.train_step(part_of(backend, make_batch(name, step)))
    return dict(backend.export())


if __name__ == "__main__":
    faulthandler.dump_traceback_later(DEADLINE_S - 20, exit=True)
    run(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), float(sys.argv[5]))
