"""Trains cases on the ranks of a backend; rank 0 writes what they reported and the weights."""

import faulthandler
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.trainer.megatron.launch import DEADLINE_S
from tests.trainer.megatron.layouts import LAYOUTS
from tests.trainer.megatron.ranks import joined
from tests.trainer.recomputed.backend_run import make_models, run_case, weights_of
from tests.trainer.recomputed.cases import CASES
from trainer.ranks.process_group import join_ranks


@contextmanager
def process_group(ranks: int) -> Iterator[None]:
    """Let all backends of the block share one group."""
    owns = join_ranks(torch.device("cpu"), ranks)
    yield
    if owns:
        dist.destroy_process_group()


def run(kind: str, layout: str, directory: Path, out: Path, names: list[str]) -> None:
    """Make the steps of each case with a kind of backend."""
    torch.set_num_threads(1)
    parallel = LAYOUTS[layout]
    with joined(layout) if kind == "megatron" else process_group(parallel.world_size):
        for name in names:
            models = make_models(kind, CASES[name], directory, parallel)
            reports = run_case(models, CASES[name], directory, dist.get_rank())
            weights = {tensor: values.clone() for tensor, values in weights_of(models).items()}
            models.close()
            if dist.get_rank() == 0:
                (out / name).mkdir(parents=True)
                (out / name / "reports.json").write_text(json.dumps(reports))
                save_file(weights, out / name / "weights.safetensors")


if __name__ == "__main__":
    faulthandler.dump_traceback_later(DEADLINE_S - 20, exit=True)
    run(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), sys.argv[5:])
