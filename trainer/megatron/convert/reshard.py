"""Plans for each Hugging Face tensor the training ranks' rows that make it up: pure, plain data.

The plan names the pieces of every tensor: segments of the ranks' parameters. Loading reads the plan
backwards. An engine with ranks of its own needs no other plan: it cuts these pieces once more, at the
boundaries of its ranks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from protocol.errors import SettingsError
from trainer.megatron.convert.rules import Rule, Segment
from trainer.megatron.layout import Layout


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
    pieces: tuple[Segment, ...]
    expert: bool = False
    """Whether the parameter is an expert's."""
    exact: bool = False
    """Whether the tensor is float32 even if the others are not."""

    def on_rank(self, number: int) -> list[Segment]:
        """Return the pieces that the rank with this number in the grid has, in order."""
        return [each for piece in self.pieces for each in (piece, *piece.copies) if each.rank == number]


def plan_of(parts: Iterable[tuple[int, Sequence[Rule]]], layout: Layout) -> tuple[TensorPlan, ...]:
    """Plan the tensors that rules name, in the order of the rules.

    Args:
        parts: pairs (pipeline stage, rules of its parameters).
        layout: layout of the model.


    Raises:
        SettingsError: the layout does not divide a parameter, or a name has two sources.
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
            # Replicated rows come from the first rank that has them.
            tuple(replace(found[0], copies=tuple(found[1:])) for _, found in sorted(holders[name].items())),
            rule.expert,
            rule.exact,
        )
        for name, shape in rule.shapes.items()
    ]


def in_turns(plans: Iterable[TensorPlan]) -> TensorPlan | None:
    """Return the first tensor that alternates with others in a rank's parameter; None: there is none."""
    return next((plan for plan in plans if len(plan.on_rank(0)) > 1), None)


def stretch(tensor: Any, dim: int, start: int, length: int, matrix: int | None) -> Any:
    """Return a view of `length` rows of a tensor, or of one matrix of a stack."""
    return (tensor if matrix is None else tensor[matrix]).narrow(dim, start, length)
