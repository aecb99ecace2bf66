"""Plans the source rows of each Hugging Face tensor on the training ranks, as plain data.

A plan lists the pieces of every tensor: segments of the ranks' parameters. Loading applies the plan in
reverse. An engine with its own ranks uses the same plan, and cuts the pieces at its ranks' boundaries.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from protocol.errors import SettingsError
from trainer.megatron.convert.rules import Rule, Segment
from trainer.megatron.layout import Layout


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """Source of a Hugging Face tensor. `pieces` cover the tensor exactly once; rows count along `dim`."""

    name: str
    shape: tuple[int, ...]
    dim: int
    stage: int
    """Pipeline rank."""
    parameter: str
    """Name of the parameter on the ranks of the stage."""
    pieces: tuple[Segment, ...]
    expert: bool = False
    """Whether the parameter belongs to an expert."""
    exact: bool = False
    """Whether the tensor is always float32."""

    def on_rank(self, number: int) -> list[Segment]:
        """Return the pieces on the rank with a given grid number, in order."""
        return [each for piece in self.pieces for each in (piece, *piece.copies) if each.rank == number]


def plan_of(parts: Iterable[tuple[int, Sequence[Rule]]], layout: Layout) -> tuple[TensorPlan, ...]:
    """Plan the tensors of rules, in the order of the rules.

    Args:
        parts: pairs (pipeline stage, rules of its parameters).
        layout: layout of the model.

    Raises:
        SettingsError: the layout does not divide a parameter, or a tensor has two sources.
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
    holders: dict[str, dict[tuple[int, int], list[Segment]]] = {name: {} for name in rule.shapes}
    for one in rule.segments(layout.grid(expert=rule.expert)):
        holders[one.name].setdefault((one.matrix or 0, one.start), []).append(one)
    return [
        TensorPlan(
            name,
            shape,
            rule.dim,
            stage,
            rule.parameter,
            # Replicated rows come from the first rank with the rows.
            tuple(replace(found[0], copies=tuple(found[1:])) for _, found in sorted(holders[name].items())),
            rule.expert,
            rule.exact,
        )
        for name, shape in rule.shapes.items()
    ]


def first_interleaved(plans: Iterable[TensorPlan]) -> TensorPlan | None:
    """Return the first tensor that alternates with others in a rank's parameter; None if there is none."""
    return next((plan for plan in plans if len(plan.on_rank(0)) > 1), None)


def narrow_rows(tensor: Any, dim: int, start: int, length: int, matrix: int | None) -> Any:
    """Return a view of `length` rows of a tensor, or of one matrix of a stack."""
    return (tensor if matrix is None else tensor[matrix]).narrow(dim, start, length)
