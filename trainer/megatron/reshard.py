"""Plans which slice of which training rank is which part of a Hugging Face tensor: pure, plain data.

The plan names the pieces of every tensor; a piece is rows of one rank's parameter. Loading reads it
backwards. An engine that is split itself needs no other plan, only these pieces cut once more at its own
boundaries.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from protocol.errors import SettingsError
from trainer.megatron.architecture.numbers import Architecture
from trainer.megatron.convert.families import embedding_rules, layer_rules, output_rules
from trainer.megatron.convert.rules import Rule
from trainer.megatron.layout import Layout


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a tensor: `length` at `start` are the rows at `local_start` of a rank's parameter."""

    rank: int
    """Number of the rank in the grid of the parameter, see `Layout.grid`."""
    start: int
    local_start: int
    length: int
    of: int | None = None
    """See `Segment`, as `source`."""
    source: int | None = None


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """Source of a Hugging Face tensor. `pieces` cover it exactly once; rows count along `dim`."""

    name: str
    shape: tuple[int, ...]
    dim: int
    stage: int
    """Pipeline rank."""
    parameter: str
    """Name on the ranks of that stage."""
    pieces: tuple[Piece, ...]
    expert: bool = False
    """Whether the parameter is an expert's."""
    exact: bool = False
    """Whether it is float32 whatever the dtype of the others."""


def stage_rules(architecture: Architecture, layout: Layout, stage: int) -> list[Rule]:
    """Return the rules of the parameters that a pipeline stage holds, chunk by chunk."""
    return [
        rule for chunk in range(layout.chunks) for rule in chunk_rules(architecture, layout, stage, chunk)
    ]


def chunk_rules(architecture: Architecture, layout: Layout, stage: int, chunk: int) -> list[Rule]:
    """Return the rules of one model chunk of a stage. With several, their names begin with the chunk's."""
    first = (stage, chunk) == (0, 0)
    last = (stage, chunk) == (layout.pp - 1, layout.chunks - 1)
    rules = embedding_rules(architecture) if first else []
    for local, layer in enumerate(layout.stages[stage][chunk]):
        rules += layer_rules(architecture, layer, local)
    if last:
        rules += output_rules(architecture, with_embedding=layout.pp * layout.chunks == 1)
    prefix = chunk_prefix(layout, chunk)
    return [replace(rule, parameter=prefix + rule.parameter) for rule in rules]


def chunk_prefix(layout: Layout, chunk: int) -> str:
    """Return what the names of a chunk's parameters begin with: nothing if it is the only one."""
    return f"chunks.{chunk}." if layout.chunks > 1 else ""


def export_plan(architecture: Architecture, layout: Layout) -> tuple[TensorPlan, ...]:
    """Plan all tensors of the model in the order of the export: embedding, layers, final norm, output layer.

    Raises:
        SettingsError: the model cannot be split so, or a name has two sources.
    """
    chunks = [
        (stage, chunk_rules(architecture, layout, stage, chunk))
        for chunk in range(layout.chunks)
        for stage in range(layout.pp)
    ]
    return plan_of(chunks, layout)


def plan_of(parts: Iterable[tuple[int, Sequence[Rule]]], layout: Layout) -> tuple[TensorPlan, ...]:
    """Plan the tensors that rules name, in their order, each part with its pipeline stage.

    Raises:
        SettingsError: a parameter cannot be split so, or a name has two sources.
    """
    plans: dict[str, TensorPlan] = {}
    for stage, rules in parts:
        for rule in rules:
            if not rule.owner:
                continue
            for plan in _tensor_plans(rule, layout, stage):
                if plan.name in plans:
                    raise SettingsError(
                        f"{plan.name} is mapped twice: from {plans[plan.name].parameter} and {plan.parameter}"
                    )
                plans[plan.name] = plan
    return tuple(plans.values())


def _tensor_plans(rule: Rule, layout: Layout, stage: int) -> list[TensorPlan]:
    pieces: dict[str, dict[tuple[int, int], Piece]] = {name: {} for name in rule.shapes}
    for s in rule.segments(layout.grid(expert=rule.expert)):
        # Replicated rows come from the first rank that has them.
        pieces[s.name].setdefault(
            (s.source or 0, s.start), Piece(s.rank, s.start, s.local_start, s.length, s.of, s.source)
        )
    return [
        TensorPlan(
            name,
            shape,
            rule.dim,
            stage,
            rule.parameter,
            tuple(pieces[name][place] for place in sorted(pieces[name])),
            rule.expert,
            rule.exact,
        )
        for name, shape in rule.shapes.items()
    ]


def stretch(tensor: Any, dim: int, start: int, length: int, matrix: int | None) -> Any:
    """Return a view of `length` rows of a tensor, or of one matrix of a stack."""
    return (tensor if matrix is None else tensor[matrix]).narrow(dim, start, length)
