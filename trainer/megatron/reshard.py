"""Plans which slice of which training rank is which part of a Hugging Face tensor: pure, plain data.

The plan names the pieces of every tensor; a piece is rows of one rank's parameter. Loading reads it
backwards. An engine that is split itself needs no other plan, only these pieces cut once more at its own
boundaries.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.errors import SettingsError
from trainer.megatron.architecture import Architecture
from trainer.megatron.convert.families import embedding_rules, layer_rules, output_rules
from trainer.megatron.convert.rules import Rule


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a tensor: `length` at `start` are the rows at `local_start` of tensor rank `tp`."""

    tp: int
    start: int
    local_start: int
    length: int


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


def stage_rules(architecture: Architecture, pp: int, stage: int) -> list[Rule]:
    """Return the rules of the parameters that pipeline stage `stage` of `pp` holds.

    Raises:
        SettingsError: the layers cannot be divided evenly.
    """
    if architecture.layers % pp:
        raise SettingsError(
            f"pipeline_model_parallel_size = {pp} does not divide the model's {architecture.layers} layers: "
            "choose a divisor"
        )
    per_stage = architecture.layers // pp
    rules = embedding_rules(architecture) if stage == 0 else []
    for local in range(per_stage):
        rules += layer_rules(architecture, stage * per_stage + local, local)
    if stage == pp - 1:
        rules += output_rules(architecture, with_embedding=pp == 1)
    return rules


def export_plan(architecture: Architecture, tp: int, pp: int) -> tuple[TensorPlan, ...]:
    """Plan all tensors of the model in the order of the export: embedding, layers, final norm, output layer.

    Raises:
        SettingsError: the model cannot be split so, or a name has two sources.
    """
    return plan_of([stage_rules(architecture, pp, stage) for stage in range(pp)], tp)


def plan_of(stages: Sequence[Sequence[Rule]], tp: int) -> tuple[TensorPlan, ...]:
    """Plan the tensors that the rules of each pipeline stage name, in their order.

    Raises:
        SettingsError: a parameter cannot be split so, or a name has two sources.
    """
    plans: dict[str, TensorPlan] = {}
    for stage, rules in enumerate(stages):
        for rule in rules:
            if not rule.owner:
                continue
            for plan in _tensor_plans(rule, tp, stage):
                if plan.name in plans:
                    raise SettingsError(
                        f"{plan.name} is mapped twice: from {plans[plan.name].parameter} and {plan.parameter}"
                    )
                plans[plan.name] = plan
    return tuple(plans.values())


def _tensor_plans(rule: Rule, tp: int, stage: int) -> list[TensorPlan]:
    pieces: dict[str, dict[int, Piece]] = {name: {} for name in rule.shapes}
    for segment in rule.segments(tp):
        # Replicated rows come from the first rank that has them.
        pieces[segment.name].setdefault(
            segment.start, Piece(segment.rank, segment.start, segment.local_start, segment.length)
        )
    return [
        TensorPlan(
            name,
            shape,
            rule.dim,
            stage,
            rule.parameter,
            tuple(pieces[name][start] for start in sorted(pieces[name])),
        )
        for name, shape in rule.shapes.items()
    ]
