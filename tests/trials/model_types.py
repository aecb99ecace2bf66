"""Trains a tiny random model of every causal type of transformers with `fsdp`, and writes a table.

    python -m tests.trials.model_types [TYPE ...]      # all types: results/model_types.md

Each type runs in a process of its own: log-probabilities and export are compared with transformers', then a
step is made.
"""

import contextlib
import multiprocessing
import sys
import tempfile
import warnings
from collections.abc import Iterable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from services.tools.check_model import check_model
from tests.trainer.fsdp.tiny_models import SIZES, save_tiny
from tests.trainer.megatron.models import make_batch
from trainer.algorithms.registry import make_algorithm
from trainer.batch import Batch
from trainer.config import AlgorithmConfig, OptimizerConfig, ParallelConfig, TrainerConfig
from trainer.fsdp.backend import FsdpBackend

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

| type | answer | samples | largest difference |
|---|---|---|---|
"""
Row = tuple[str, str, str, str]


def answer_of(model_type: str) -> Row:
    """Return the row of a type."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        try:
            model_dir = save_tiny(model_type, Path(directory))
        except Exception as error:  # whatever a configuration says of tiny sizes
            return model_type, f"not made: {_line(error)}", "", ""
        try:
            found = check_model(model_dir, backend="fsdp")
            if not found.works:
                return model_type, f"refused: {_line(found.problem)}", "", ""
            if problem := _step_problem(model_dir):
                return model_type, f"refused: {problem}", "", ""
        except Exception as error:  # a type that transformers itself cannot run belongs into the table
            return model_type, f"fails: {_line(error)}", "", ""
    why_rows = found.facts["why_rows"]
    samples = f"padded: {why_rows}" if why_rows else "packed"
    return model_type, "works", samples, f"{found.facts['logprobs']['largest']:.0e}"


def write_table(rows: Iterable[Row]) -> None:
    rows = list(rows)
    made = [row for row in rows if not row[1].startswith("not made")]
    works = sum(row[1] == "works" for row in made)
    head = HEAD.format(version=transformers.__version__, works=works, made=len(made))
    OUT.write_text(head + "".join(f"| `{row[0]}` | {' | '.join(row[1:])} |\n" for row in rows))


def _step_problem(model_dir: Path) -> str:
    backend = FsdpBackend(
        model_dir,
        parallel=ParallelConfig(),
        optimizer=OptimizerConfig(lr=1e-3),
        trainer=TrainerConfig(device="cpu", micro_batch_tokens=64),
        algorithm=make_algorithm(AlgorithmConfig()),
    )
    before = {name: tensor.clone() for name, tensor in backend.export()}
    stats = backend.train_step(_batch())
    changed = sum(not torch.equal(before[name], tensor) for name, tensor in backend.export())
    backend.close()
    if stats.skipped:
        return f"its step was skipped: {stats.skipped}"
    return "" if changed else "a step changes nothing"


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
        return mine.recv() if mine.poll(LIMIT_S) else (model_type, f"fails: not within {LIMIT_S:g} s", "", "")
    except EOFError:
        return model_type, "fails: its process ended", "", ""
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
