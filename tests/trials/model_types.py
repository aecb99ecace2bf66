"""Trains a tiny random model of every causal type of transformers with `fsdp`, and writes a table.

    python -m tests.trials.model_types [TYPE ...]      # all types: results/model_types.md

Each type runs in a process of its own: log-probabilities and export are compared with transformers', then a
step is made, and compared with the one of two tensor-parallel ranks.
"""

import contextlib
import json
import logging
import multiprocessing
import sys
import tempfile
import warnings
from collections.abc import Iterable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from services.tools.check_model import check_model
from tests.trainer.fsdp.tiny_models import SIZES, save_tiny
from tests.trainer.megatron.models import make_batch
from trainer.algorithms.registry import make_algorithm
from trainer.batch import Batch
from trainer.config import AlgorithmConfig, OptimizerConfig, ParallelConfig, TrainerConfig
from trainer.fsdp.backend import FsdpBackend
from trainer.fsdp.layout import division_refusal, plan_of

OUT = Path(__file__).resolve().parents[2] / "results/model_types.md"
LIMIT_S = 180.0
FORKS = multiprocessing.get_context("fork")
HEAD = """# Model types of transformers with the trainer `fsdp`

`python -m tests.trials.model_types` made a tiny random model of each causal type of transformers
{version}, on a CPU in float32. "works" means: log-probabilities equal transformers' within 1e-4,
the export equals the checkpoint bit for bit, and a training step changes the weights. "padded" says
why samples are rows instead of packed. "not made" means that the sizes of a tiny model do not fit
this type's configuration; it says nothing of real ones. {works} of {made} types that were made work. Of
the others most read in both directions (BERT and its kin), or are models of images around a text
model that has a type of its own, such as `qwen3_5_text`.

"equal" in the last column: two tensor-parallel ranks give one rank's log-probabilities within 1e-4,
the same norm of the gradient to 1e-4, and log-probabilities within 1e-3 after an update of AdamW
({divided} types).

| type | answer | samples | largest difference | two tensor-parallel ranks |
|---|---|---|---|---|
"""
Row = tuple[str, ...]
EQUAL = "equal"


def answer_of(model_type: str) -> Row:
    """Return the row of a type."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        try:
            model_dir = save_tiny(model_type, Path(directory))
        except Exception as error:  # whatever a configuration says of tiny sizes
            return model_type, f"not made: {_line(error)}", "", "", ""
        try:
            found = check_model(model_dir, backend="fsdp")
            if not found.works:
                return model_type, f"refused: {_line(found.problem)}", "", "", ""
            problem, made = _make_step(model_dir, ParallelConfig())
            if problem:
                return model_type, f"refused: {problem}", "", "", ""
            divided = _compare_ranks(model_dir, made)
        except Exception as error:  # a type that transformers itself cannot run belongs into the table
            return model_type, f"fails: {_line(error)}", "", "", ""
    why_rows = found.facts["why_rows"]
    samples = f"padded: {why_rows}" if why_rows else "packed"
    return model_type, "works", samples, f"{found.facts['logprobs']['largest']:.0e}", divided


def write_table(rows: Iterable[Row]) -> None:
    rows = list(rows)
    made = [row for row in rows if not row[1].startswith("not made")]
    works = sum(row[1] == "works" for row in made)
    divided = sum(row[-1] == EQUAL for row in rows)
    head = HEAD.format(version=transformers.__version__, works=works, made=len(made), divided=divided)
    OUT.write_text(head + "".join(f"| `{row[0]}` | {' | '.join(row[1:])} |\n" for row in rows))


def _make_step(model_dir: Path, parallel: ParallelConfig) -> tuple[str, dict[str, torch.Tensor]]:
    """Return why a step is not one, and what it computed."""
    backend = FsdpBackend(
        model_dir,
        parallel=parallel,
        optimizer=OptimizerConfig(lr=1e-3),
        trainer=TrainerConfig(device="cpu", micro_batch_tokens=64),
        algorithm=make_algorithm(AlgorithmConfig()),
    )
    weights, first = {name: tensor.clone() for name, tensor in backend.export()}, backend.logprobs(_batch())
    stats = backend.train_step(_batch())
    changed = [not torch.equal(weights[name], tensor) for name, tensor in backend.export()]
    made = {"first": first, "norm": torch.tensor(stats.grad_norm), "then": backend.logprobs(_batch())}
    backend.close()
    if stats.skipped:
        return f"its step was skipped: {stats.skipped}", made
    return "" if any(changed) or not weights else "a step changes nothing", made


def _compare_ranks(model_dir: Path, expected: dict[str, torch.Tensor]) -> str:
    """Return whether two tensor-parallel ranks compute the same, or why they do not."""
    config = json.loads((model_dir / "config.json").read_text())
    if refusal := division_refusal(plan_of(config), config.get("text_config") or config, 2):
        return "no plan" if "no tensor-parallel plan" in refusal else f"refused: {refusal}"
    with tempfile.TemporaryDirectory() as place:
        ranks = [FORKS.Process(target=_be_rank, args=(rank, model_dir, Path(place))) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(LIMIT_S / 3)
            process.kill()
            process.join()
        errors = sorted(Path(place).glob("error-*"))
        if errors or not (found := Path(place) / "made.safetensors").exists():
            return f"fails: {_line(errors[0].read_text() if errors else 'a rank ended')}"
        made = load_file(found)
    limits = {"first": 1e-4, "norm": 1e-4 * float(expected["norm"]), "then": 1e-3}
    differences = {name: float((made[name] - expected[name]).abs().max()) for name in limits}
    wrong = [f"{name} {differences[name]:.0e}" for name in limits if not differences[name] <= limits[name]]
    return f"differs: {', '.join(wrong)}" if wrong else EQUAL


def _be_rank(rank: int, model_dir: Path, place: Path) -> None:
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    try:
        dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=2)
        _, made = _make_step(model_dir, ParallelConfig(tensor_model_parallel_size=2))
        if rank == 0:
            save_file(made, place / "made.safetensors")
        dist.barrier()
    except Exception as error:  # the table says it
        (place / f"error-{rank}").write_text(str(error))


def _batch() -> Batch:
    batch = make_batch("llama", 1)
    return replace(batch, tokens=batch.tokens % SIZES["vocab_size"])


def _line(problem: object) -> str:
    text = " ".join(str(problem).split()).replace("|", "/")
    return text if len(text) <= 160 else f"{text[:160]} ..."


def _child(model_type: str, answer: Connection) -> None:
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(sys.stderr):
        answer.send(answer_of(model_type))


def _in_process(model_type: str) -> Row:
    mine, theirs = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=_child, args=(model_type, theirs))
    process.start()
    theirs.close()
    try:
        return (
            mine.recv()
            if mine.poll(LIMIT_S)
            else (model_type, f"fails: not within {LIMIT_S:g} s", "", "", "")
        )
    except EOFError:
        return model_type, "fails: its process ended", "", "", ""
    finally:
        process.kill()
        process.join()


def main() -> None:
    transformers.logging.set_verbosity_error()
    types = sys.argv[1:] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    rows = []
    for model_type in types:
        rows.append(_in_process(model_type))
        print(*rows[-1], sep="  ", flush=True)
    if not sys.argv[1:]:
        write_table(rows)


if __name__ == "__main__":
    main()
