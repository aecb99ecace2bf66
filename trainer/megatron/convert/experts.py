"""Defines the rules of routers, and of experts that a checkpoint has in one tensor."""

from trainer.megatron.architecture.experts import Experts
from trainer.megatron.convert.rules import Direct, ExpertTensor, Rule


def router_rules(experts: Experts, hidden: int, here: str, there: str) -> list[Rule]:
    """Return the rules of a layer's router.

    Args:
        experts: the model's.
        hidden: hidden size.
        here: what megatron's names begin with.
        there: what those of the checkpoint begin with.
    """
    count = (experts.count,)
    rules: list[Rule] = [Direct(parameter=f"{here}weight", name=f"{there}weight", shape=(*count, hidden))]
    if experts.biases:
        rules.append(Direct(parameter=f"{here}logit_bias", name=f"{there}bias", shape=count))
    if experts.bias:
        name = f"{there}e_score_correction_bias"
        rules.append(Direct(parameter=f"{here}bias", name=name, shape=count, exact=True))
    return rules


def stacked_rules(experts: Experts, hidden: int, here: str, there: str) -> list[Rule]:
    """Return the rules of a layer's experts with biases, whose matrices are transposed in the checkpoint.

    Gate and up alternate, so pairs of columns stay on one rank. Arguments are those of `router_rules`.
    """
    count, wide = experts.count, experts.intermediate

    def rule(parameter: str, name: str, *matrix: int, dim: int = 0, unit: int = 1) -> Rule:
        return ExpertTensor(
            parameter=here + parameter, name=there + name, shape=(count, *matrix), dim=dim, unit=unit
        )

    return [
        rule("fc1", "gate_up_proj", hidden, 2 * wide, dim=1, unit=2),
        rule("fc1_bias", "gate_up_proj_bias", 2 * wide, unit=2),
        rule("fc2", "down_proj", wide, hidden),
        rule("fc2_bias", "down_proj_bias", hidden),
    ]
