"""Runs `tether check-model`: compares a model in the trainer with Hugging Face's implementation.

Under torchrun (`python -m services.tools.check_model DIR LAYOUT SAMPLES THREADS`) each rank of the layout
runs this module.
"""

import dataclasses
import gc
import json
import math
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import psutil  # type: ignore[import-untyped]
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from protocol.device.checkpoint_shapes import count_parameters, tensor_shapes
from protocol.errors import SettingsError
from protocol.host.child_environment import with_variables
from protocol.host.prctl import die_with_parent
from rollout.engines.listed_models import engines_with
from services.preflight.engines import engine_refusals
from services.preflight.model import ModelFacts
from services.runtime.errors import configure_logging
from services.settings.automatic import visible_gpus
from trainer.backends.plain_copy import quantization_of, write_plain
from trainer.backends.safetensors_reader import SafetensorsReader
from trainer.batch import Batch
from trainer.config import ParallelConfig
from trainer.megatron.families.config_file import read_config
from trainer.megatron.families.experts import check_ranks
from trainer.megatron.families.numbers import Architecture
from trainer.megatron.families.reading import architecture_of
from trainer.megatron.families.stages import export_plan
from trainer.megatron.layout import Layout
from trainer.megatron.loading import check_names
from trainer.model_check.differences import TOLERANCE
from trainer.model_check.expected import LONGEST, batch_of, hf_logprobs, random_samples
from trainer.ranks.launch import result_of_ranks
from trainer.storage.checksums import check_model_files

BYTES_PER_PARAMETER = 8
"""Host memory per parameter: first Hugging Face's weights (4), then the trainer's weights and gradients."""
BYTES_PER_RANK = 1 << 29
"""Additional host memory per process if there are several."""
RANKS_S = 3600
"""Timeout of the ranks, seconds."""
GIB = 1 << 30
ONE_RANK = ParallelConfig()
SIZES = {
    "tp": ("tensor", "tensor_model_parallel_size"),
    "pp": ("pipeline", "pipeline_model_parallel_size"),
    "vpp": ("virtual", "virtual_pipeline_model_parallel_size"),
    "cp": ("context", "context_parallel_size"),
    "dp": ("data", "data_parallel_size"),
    "ep": ("expert", "expert_model_parallel_size"),
    "etp": ("expert tensor", "expert_tensor_parallel_size"),
}
"""Reported sizes of a layout: name -> divided dimension, and setting."""
STATED = {"layers": "num_hidden_layers", "hidden": "hidden_size", "vocabulary": "vocab_size"}
"""Reported fields of a transformers model: name -> field of config.json."""


class ModelVerdict(StrEnum):
    """Result of the check, in one word."""

    WORKS = "OK"
    UNSUPPORTED = "NOT SUPPORTED"
    DAMAGED = "NOT A WHOLE CHECKPOINT"  # the files do not match config.json
    DIFFERENT = "DIFFERENT"


@dataclass(frozen=True, slots=True)
class CheckedModel:
    """Result of `tether check-model`."""

    verdict: ModelVerdict
    problem: str
    """First problem, a sentence; empty if the model works."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts that were read or compared before the problem was found."""

    @property
    def works(self) -> bool:
        return self.verdict is ModelVerdict.WORKS

    def as_dict(self) -> dict[str, Any]:
        """Return the result as JSON types."""
        verdict = {"works": self.works, "verdict": str(self.verdict), "problem": self.problem}
        return {**verdict, **self.facts}


def layout_of(
    *, tp: int = 1, pp: int = 1, vpp: int = 1, cp: int = 1, ep: int = 1, etp: int = 1
) -> ParallelConfig:
    """Return the smallest layout of these sizes; experts may need more ranks than one replica has.

    Args:
        tp: tensor-parallel size.
        pp: number of pipeline stages.
        vpp: number of model chunks per stage.
        cp: context-parallel size.
        ep: expert-parallel size.
        etp: expert-tensor-parallel size.
    """
    return ParallelConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=cp,
        data_parallel_size=ep * etp // math.gcd(tp * cp, ep * etp),
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )


def check_model(
    model_dir: Path, parallel: ParallelConfig = ONE_RANK, backend: str = "megatron"
) -> CheckedModel:
    """Check a model directory: load it in a layout on the CPU, compare logits and exported bits.

    Args:
        model_dir: directory with config.json and safetensors.
        parallel: layout of the ranks. With experts, tensor parallelism implies sequence parallelism.
        backend: megatron or fsdp; fsdp is checked on one rank.

    Raises:
        SettingsError: there is no model, the layout cannot divide it, a library is missing, or memory is
            insufficient.
        TetherError: a rank failed.
    """
    if backend == "fsdp" and parallel != ONE_RANK:
        raise SettingsError("--backend fsdp is checked on one rank: leave --tp and the other sizes out")
    facts: dict[str, Any] = {"model": str(model_dir)}
    if quantization_of(model_dir) is not None:
        return _check_plain_copy(model_dir, parallel, backend, facts)
    path = model_dir / "config.json"
    config = read_config(model_dir)
    facts |= _engines(ModelFacts(model_dir, config, {}, is_made=True))
    try:
        if backend == "fsdp":
            return _check_sharded(model_dir, config, facts)
        architecture = architecture_of(config, path)
    except SettingsError as error:
        hint = "" if backend == "fsdp" else "; --backend fsdp checks it for trainer.backend 'fsdp'"
        return CheckedModel(ModelVerdict.UNSUPPORTED, f"{error}{hint}", facts)
    if architecture.experts.count and parallel.tensor_model_parallel_size > 1:
        parallel = dataclasses.replace(parallel, sequence_parallel=True)
    facts |= {"config": _stated(architecture), **_sizes(parallel)}
    _check_layout(architecture, parallel)
    try:
        check_model_files(model_dir)
        parameters = count_parameters(tensor_shapes(model_dir))
        with SafetensorsReader(model_dir) as reader:
            check_names(reader, architecture, Layout.of(ParallelConfig(), architecture.layers))
    except (SettingsError, SafetensorError, OSError) as error:
        return CheckedModel(ModelVerdict.DAMAGED, str(error), facts)
    facts |= {"parameters": parameters, "needed_gb": check_memory(model_dir, parameters, parallel.world_size)}
    if find_spec("megatron") is None:
        raise SettingsError("megatron-core is not installed: pip install 'tether-rl[megatron]'")
    with _expected(model_dir, architecture.vocabulary, architecture.max_positions) as (batch, expected):
        facts |= _about(batch)
        run = _under_torchrun if parallel.world_size > 1 else _on_this_rank
        threads = max(1, torch.get_num_threads() // parallel.world_size)
        facts |= run(model_dir, parallel, batch, expected, threads)
    return _verdict(facts)


def _engines(model: ModelFacts) -> dict[str, Any]:
    """Return which installed engines support a model on this machine, and why others reject it."""
    listed, gpus = engines_with(model.config), visible_gpus(os.environ)
    found = {engine: [*engine_refusals(engine, model, gpus)] for engine in listed}
    refusals = {engine: problems[0].cause for engine, problems in found.items() if problems}
    engines = {engine: has and engine not in refusals for engine, has in listed.items()}
    return {"engines": engines, "refusals": refusals}


def _check_plain_copy(
    model_dir: Path, parallel: ParallelConfig, backend: str, facts: dict[str, Any]
) -> CheckedModel:
    """Check the dequantised copy of a quantised model, as a run would write it."""
    with tempfile.TemporaryDirectory() as directory:
        plain = Path(directory, "model")
        try:
            write_plain(model_dir, plain)
        except (SettingsError, SafetensorError, OSError) as error:
            return CheckedModel(ModelVerdict.UNSUPPORTED, str(error), facts)
        found = check_model(plain, parallel, backend)
    return dataclasses.replace(found, facts={**found.facts, **facts})


def _check_sharded(model_dir: Path, config: Mapping[str, Any], facts: dict[str, Any]) -> CheckedModel:
    """Check a transformers model with the backend `fsdp`."""
    from trainer.model_check.rank import check_sharded  # imports transformers

    name, text = (config.get("architectures") or ["?"])[0], config.get("text_config") or config
    stated = {label: text[field] for label, field in STATED.items() if field in text}
    facts |= {"config": {"model_type": config.get("model_type", "?"), "name": name, **stated}}
    facts |= _sizes(ONE_RANK)
    parameters = count_parameters(tensor_shapes(model_dir))
    facts |= {"parameters": parameters, "needed_gb": check_memory(model_dir, parameters, 1)}
    positions, vocabulary = int(text.get("max_position_embeddings") or LONGEST), int(text["vocab_size"])
    with _expected(model_dir, vocabulary, positions) as (batch, expected):
        found, why_rows = check_sharded(model_dir, torch.get_num_threads(), batch, expected)
        facts |= _about(batch) | msgspec.to_builtins(found) | {"why_rows": why_rows}
    return _verdict(facts)


def _verdict(facts: dict[str, Any]) -> CheckedModel:
    for part in ("tensors", "logprobs"):
        if problem := facts[part]["difference"]:
            return CheckedModel(ModelVerdict.DIFFERENT, problem, facts)
    return CheckedModel(ModelVerdict.WORKS, "", facts)


def check_memory(model_dir: Path, parameters: int, ranks: int) -> float:
    """Return the host memory that the check needs, GiB.

    Raises:
        SettingsError: less memory is available.
    """
    needed = BYTES_PER_PARAMETER * parameters + (BYTES_PER_RANK * ranks if ranks > 1 else 0)
    available = psutil.virtual_memory().available
    if needed > available:
        raise SettingsError(
            f"{model_dir}: checking its {parameters:,} parameters takes about {needed / GIB:.1f} GiB of host "
            f"memory, and {available / GIB:.1f} GiB are available: check it on a larger machine"
        )
    return needed / GIB


def render_checked_model(result: CheckedModel) -> str:
    """Format the result: the verdict, then the facts."""
    facts = result.facts
    lines = [f"{result.verdict}: {result.problem}" if result.problem else str(result.verdict)]
    if "config" not in facts:
        return "\n".join((*lines, f"model    {facts['model']}"))
    config = dict(facts["config"])
    count = f", {facts['parameters']:,} parameters" if "parameters" in facts else ""
    listing = [
        f"{engine} {f'refuses it: {cause}' if cause else 'lists it' if has else 'does not list it'}"
        for engine, has in facts["engines"].items()
        for cause in [facts["refusals"].get(engine)]
    ]
    lines += [
        f"model    {facts['model']}: {config.pop('model_type')} ({config.pop('name')}){count}",
        f"config   {_in_words(config)}",
        f"engines  {'; '.join(['hf', *listing])}",
    ]
    if "logprobs" not in facts:
        return "\n".join(lines)
    sizes = " x ".join(
        f"{SIZES[size][0]} {facts[size]}" for size in SIZES if size in ("tp", "pp") or facts[size] > 1
    )
    lines.append(
        f"layout   {sizes}: {facts['ranks']} rank(s) "
        f"on the CPU, gloo, in float32; about {facts['needed_gb']:.1f} GiB"
    )
    for label, part, in_words in (
        ("logits", "logprobs", _logprobs_in_words),
        ("export", "tensors", _tensors_in_words),
    ):
        difference = facts[part]["difference"]
        place = "" if difference == result.problem else f": {difference}"
        lines.append(f"{label}   {f'different{place}' if difference else in_words(facts)}")
    return "\n".join(lines)


def _logprobs_in_words(facts: Mapping[str, Any]) -> str:
    logprobs = facts["logprobs"]
    return (
        f"{logprobs['compared']} log-probabilities of {facts['samples']} {_laid_out(facts)} random samples "
        f"(at most {facts['longest']} tokens) equal Hugging Face's in float32 within {TOLERANCE:g} x "
        f"max(1, size); largest difference {logprobs['largest']:.1e}"
    )


def _laid_out(facts: Mapping[str, Any]) -> str:
    why = facts.get("why_rows")
    return f"padded ({why})" if why else "packed"


def _tensors_in_words(facts: Mapping[str, Any]) -> str:
    tensors = facts["tensors"]
    ignored = f"; not needed, not compared: {', '.join(tensors['ignored'])}" if tensors["ignored"] else ""
    return (
        f"{tensors['compared']} tensors equal the checkpoint's bit for bit, after the cast of loading from "
        f"{' and '.join(tensors['dtypes'])} to float32{ignored}"
    )


def _stated(configuration: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults, by name."""
    return {
        item.name: _stated(value) if dataclasses.is_dataclass(value) else value
        for item in dataclasses.fields(configuration)
        if (value := getattr(configuration, item.name)) != item.default
    }


def _in_words(values: Mapping[str, Any]) -> str:
    """Format the non-empty fields of a configuration."""
    parts = []
    for name, value in values.items():
        if isinstance(value, dict):
            parts.append(f"{name} ({_in_words(value)})")
        elif value is True:
            parts.append(name)
        elif value not in (None, False, "", ()):
            parts.append(f"{name} {value}")
    return ", ".join(parts)


def _sizes(parallel: ParallelConfig) -> dict[str, int]:
    """Return the reported sizes of a layout."""
    sizes = {size: getattr(parallel, field) for size, (_, field) in SIZES.items()}
    return sizes | {"ranks": parallel.world_size}


def _check_layout(architecture: Architecture, parallel: ParallelConfig) -> None:
    tp = parallel.tensor_model_parallel_size
    check_ranks(architecture.experts, parallel)
    if architecture.heads % tp:
        raise SettingsError(
            f"--tp {tp} does not divide the model's {architecture.heads} attention heads: choose a divisor"
        )
    export_plan(architecture, Layout.of(parallel, architecture.layers))


@contextmanager
def _expected(model_dir: Path, vocabulary: int, positions: int) -> Iterator[tuple[Batch, torch.Tensor]]:
    """Yield random samples and Hugging Face's log-probabilities for them; GPUs are hidden in the block."""
    batch = random_samples(vocabulary, positions)
    # megatron-core would use visible GPUs, in this process and in the ranks
    with with_variables({"CUDA_VISIBLE_DEVICES": ""}):
        expected = hf_logprobs(model_dir, batch)
        gc.collect()  # frees Hugging Face's model before the trainer's is loaded
        yield batch, expected


def _about(batch: Batch) -> dict[str, int]:
    return {"samples": len(batch.lengths), "longest": int(batch.lengths.max())}


def _on_this_rank(
    model_dir: Path, parallel: ParallelConfig, batch: Batch, expected: torch.Tensor, threads: int
) -> dict[str, Any]:
    """Run the check on this rank; return rank 0's findings, empty on other ranks."""
    from trainer.model_check.rank import check_on_rank  # imports megatron-core

    found = check_on_rank(model_dir, parallel, threads, batch, expected)
    facts: dict[str, Any] = msgspec.to_builtins(found) if found else {}
    return facts


def _under_torchrun(
    model_dir: Path, parallel: ParallelConfig, batch: Batch, expected: torch.Tensor, threads: int
) -> dict[str, Any]:
    """Run the ranks as processes; return the output of rank 0."""
    with tempfile.TemporaryDirectory(prefix="tether-check-model-") as work:
        samples = Path(work) / "samples.safetensors"
        save_file({"tokens": batch.tokens, "lengths": batch.lengths, "expected": expected}, samples)
        layout = msgspec.json.encode(parallel).decode()
        arguments = (str(model_dir.absolute()), layout, str(samples), str(threads))
        return result_of_ranks(parallel.world_size, "services.tools.check_model", *arguments, limit_s=RANKS_S)


def main() -> None:
    """Run one rank under torchrun; rank 0 prints its findings as JSON."""
    die_with_parent(signal.SIGKILL)
    configure_logging(f"check-model.{os.environ['RANK']}")
    model_dir, layout, samples, threads = sys.argv[1:]
    parallel = msgspec.json.decode(layout, type=ParallelConfig)
    tensors = load_file(samples)
    batch = batch_of(tensors["tokens"], tensors["lengths"])
    facts = _on_this_rank(Path(model_dir), parallel, batch, tensors["expected"], int(threads))
    if facts:
        print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
