"""Trains cases in one layout of Megatron ranks; rank 0 writes what they reported and the weights."""

import faulthandler
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.trainer.megatron.launch import DEADLINE_S
from tests.trainer.megatron.layouts import LAYOUTS
from tests.trainer.megatron.ranks import joined
from tests.trainer.recomputed.backend_run import make_models, run_case, weights_of
from tests.trainer.recomputed.cases import CASES


def run(layout: str, directory: Path, out: Path, names: list[str]) -> None:
    """Make the steps of each case."""
    torch.set_num_threads(1)
    with joined(layout):
        for name in names:
            models = make_models("megatron", CASES[name], directory, LAYOUTS[layout])
            reports = run_case(models, CASES[name], directory, dist.get_rank())
            weights = {tensor: values.clone() for tensor, values in weights_of(models).items()}
            models.close()
            if dist.get_rank() == 0:
                (out / name).mkdir(parents=True)
                (out / name / "reports.json").write_text(json.dumps(reports))
                save_file(weights, out / name / "weights.safetensors")


if __name__ == "__main__":
    faulthandler.dump_traceback_later(DEADLINE_S - 20, exit=True)
    run(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
