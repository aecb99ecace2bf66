"""Defines the export rules of adapters: the positions of A and B of each weight on the ranks.

Does not import torch: `tether check` uses the rules to find layers that cannot have adapters.
"""

from collections.abc import Iterable

from protocol.errors import SettingsError
from protocol.weights.lora import AdapterTarget, LoraConfig, adapter_targets
from trainer.megatron.convert.rules import Direct, ExpertStack, Interleaved, Rule, Split, Stacked


def lora_rules(rules: Iterable[Rule], config: LoraConfig) -> list[Rule]:
    """Return the adapter rules for the parameters of `rules`.

    Raises:
        SettingsError: a layer cannot have adapters, or no layer has a target module.
    """
    rules = list(rules)
    shapes = {name: shape for rule in rules for name, shape in rule.shapes.items()}
    wanted = {target.weight: target for target in adapter_targets(shapes, config)}
    return [
        found
        for rule in rules
        if rule.owner
        for name in rule.shapes
        if name in wanted
        for found in _pair(rule, wanted[name], config)
    ]


def _pair(rule: Rule, target: AdapterTarget, config: LoraConfig) -> tuple[Rule, Rule]:
    """Return the rules of A and B of one weight."""
    if isinstance(rule, ExpertStack):
        raise SettingsError(
            f"setting lora.target_modules: {target.weight} is an expert's, and experts cannot have adapters "
            "in the megatron backend: name projections of attention only"
        )
    here = f"{rule.parameter.removesuffix('.weight')}.lora.{target.module.rpartition('.')[2]}"
    a, b = (config.rank, target.shape[1]), (target.shape[0], config.rank)
    if isinstance(rule, Split) and rule.dim == 1:
        return Split(parameter=f"{here}.a", name=target.a, shape=a, dim=1), Direct(
            parameter=f"{here}.b", name=target.b, shape=b
        )
    if rule.dim != 0 or isinstance(rule, Direct | Interleaved | Stacked) or "layers" not in rule.parameter:
        raise SettingsError(
            f"setting lora.target_modules: {target.weight} cannot have an adapter in the megatron backend"
        )
    return Direct(parameter=f"{here}.a", name=target.a, shape=a), Split(
        parameter=f"{here}.b", name=target.b, shape=b
    )
