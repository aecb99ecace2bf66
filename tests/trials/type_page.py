"""Writes the table of transformers' causal model types that `tests.trials.model_types` measures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollout.engines.listed_models import listed_architectures

HEAD = """# Model types of transformers: trainers and engines

`python -m tests.trials.model_types` made a tiny random model of each causal type of transformers
{version}, on a CPU in float32. {trained} of the {made} types that were made train; {served} of these
are on `hf`, vLLM and SGLang.

- works: with `fsdp` log-probabilities equal transformers' within 1e-4, the export equals the
  checkpoint bit for bit, and a step gives the norm of the gradient and the log-probabilities of
  `reference`; `hf`, vLLM and SGLang serve it.
- works only on ...: it trains as said, and these engines alone serve it.
- refused: ...: what `tether check-model DIR --backend fsdp` says, or why a training step fails.
- not made: ...: transformers makes no model of the type from these sizes, or another library is
  missing.

`hf` serves a type if the tokens that it decoded have the log-probabilities of transformers' pass
over all of them; vLLM and SGLang, if they list the architecture ({engines}).
[families.md](families.md) has the families that these two were run with. Besides `fsdp` and
`reference` the trainer `megatron` takes the types with a mark.

"padded" says why samples are rows instead of packed. "equal" in the last column: two
tensor-parallel ranks give one rank's log-probabilities within 1e-4, the same norm of the gradient
to 1e-4, and log-probabilities within 1e-3 after an update of AdamW ({divided} types).

| type | answer | `megatron` | samples | largest difference | two tensor-parallel ranks |
|---|---|---|---|---|---|
"""
LISTED = {"vllm": "vLLM", "sglang": "SGLang"}
"""Engines whose lists are read, and their names."""
EQUAL = "equal"


@dataclass(frozen=True, slots=True)
class TypeRow:
    """What was measured of a model type."""

    model_type: str
    problem: str = ""
    """Why it does not train, with the kind of the reason before a colon; empty: it trains."""
    architecture: str = ""
    megatron: bool = False
    """Whether the trainer `megatron` has it, too."""
    decoding: str = ""
    """Why the engine `hf` does not serve it; empty: it does."""
    samples: str = ""
    difference: str = ""
    divided: str = ""
    seconds: float = 0.0


def engine_tables(sglang: Path) -> Mapping[str, frozenset[str]]:
    """Return the architectures that vLLM and SGLang list, by engine; SGLang may be in another environment."""
    return {
        "vllm": listed_architectures("vllm"),
        "sglang": listed_architectures("sglang") or listed_architectures("sglang", sglang),
    }


def write_page(rows: Sequence[TypeRow], out: Path, version: str, sglang: Path, engines: str) -> None:
    """Write the table.

    Args:
        rows: sorted by type.
        out: the page.
        version: of transformers.
        sglang: directory of SGLang's package, where this interpreter has none.
        engines: versions of the engines whose lists are read.
    """
    tables = engine_tables(sglang)
    trained = [row for row in rows if not row.problem]
    answers = {row.model_type: _answer(row, tables) for row in rows}
    head = HEAD.format(
        version=version,
        engines=engines,
        made=sum(not row.problem.startswith("not made") for row in rows),
        trained=len(trained),
        served=sum(answers[row.model_type] == "works" for row in trained),
        divided=sum(row.divided == EQUAL for row in rows),
    )
    lines = []
    for row in rows:
        megatron = "yes" if row.megatron else ""
        cells = answers[row.model_type], megatron, row.samples, row.difference, row.divided
        lines.append(f"| `{row.model_type}` | {' | '.join(cells)} |\n")
    out.write_text(head + "".join(lines))


def _answer(row: TypeRow, tables: Mapping[str, frozenset[str]]) -> str:
    if row.problem:
        return row.problem
    engines = [] if row.decoding else ["hf"]
    engines += [LISTED[name] for name, table in tables.items() if row.architecture in table]
    if len(engines) == 1 + len(LISTED):
        return "works"
    return (
        f"works only on {' and '.join(engines)}" if engines else f"trains, no engine has it: {row.decoding}"
    )
