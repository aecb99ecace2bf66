"""Trains a model in FP8 on several ranks, one of which has no sample in a step, and publishes it."""

import faulthandler
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from tests.trainer.fsdp.ranks import SHARDED, make_backend
from tests.trainer.megatron.launch import DEADLINE_S
from tests.trainer.megatron.models import step_batch
from tests.trainer.megatron.ranks import part_of, publish_pieces, write
from tests.trainer.recomputed.ranks import process_group
from trainer.backends.base import Backend
from trainer.batch import Batch

STEPS = 2
"""The second is of one sample."""


def on_policy(backend: Backend, batch: Batch) -> Batch:
    """The batch as if the backend's own model had sampled it, so that no ratio is clipped."""
    return replace(batch, behaviour_logprobs=backend.logprobs(batch))


def run(layout: str, recipe: str, model_dir: Path, out: Path) -> None:
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    with process_group(SHARDED[layout].world_size):
        backend = make_backend(model_dir, layout, "bfloat16", fp8=recipe)
        parts = [part_of(backend, step_batch(model_dir.name, step)) for step in range(STEPS)]
        norms = [backend.train_step(on_policy(backend, part)).grad_norm for part in parts]
        write(out / "after", backend.export())
        publish_pieces(backend, out)
        (out / f"norms-{torch.distributed.get_rank()}.json").write_text(json.dumps(norms))


if __name__ == "__main__":
    faulthandler.dump_traceback_later(DEADLINE_S - 20, exit=True)
    run(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
