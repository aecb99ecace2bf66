"""Lists the rules of each pipeline stage of a model, and plans its export."""

from dataclasses import replace

from protocol.errors import SettingsError
from trainer.megatron.convert.reshard import TensorPlan, plan_of
from trainer.megatron.convert.rules import Rule
from trainer.megatron.families.decoder import embedding_rules, layer_rules, output_rules
from trainer.megatron.families.numbers import Architecture
from trainer.megatron.layout import Layout


def stage_rules(architecture: Architecture, layout: Layout, stage: int) -> list[Rule]:
    """Return the rules of a pipeline stage's parameters, chunk by chunk."""
    return [
        rule for chunk in range(layout.chunks) for rule in _chunk_rules(architecture, layout, stage, chunk)
    ]


def export_plan(architecture: Architecture, layout: Layout) -> tuple[TensorPlan, ...]:
    """Plan all tensors of the model in export order: embedding, layers, final norm, output layer.

    Raises:
        SettingsError: the layout does not divide the model or its samples, or a tensor has two sources.
    """
    if architecture.delta and layout.cp > 1:
        raise SettingsError(
            f"parallel.context_parallel_size = {layout.cp} is not supported in {architecture.model_type}: "
            "the state of a gated delta net has seen every token before: set it to 1"
        )
    chunks = [
        (stage, _chunk_rules(architecture, layout, stage, chunk))
        for chunk in range(layout.chunks)
        for stage in range(layout.pp)
    ]
    return plan_of(chunks, layout)


def _chunk_rules(architecture: Architecture, layout: Layout, stage: int, chunk: int) -> list[Rule]:
    """Return the rules of one model chunk of a stage.

    With several chunks per stage, parameter names begin with the index of the chunk.
    """
    first = (stage, chunk) == (0, 0)
    last = (stage, chunk) == (layout.pp - 1, layout.chunks - 1)
    rules = embedding_rules(architecture) if first else []
    for local, layer in enumerate(layout.stages[stage][chunk]):
        rules += layer_rules(architecture, layer, local)
    if last:
        rules += output_rules(architecture, with_embedding=layout.pp * layout.chunks == 1)
    prefix = f"chunks.{chunk}." if layout.chunks > 1 else ""
    return [replace(rule, parameter=prefix + rule.parameter) for rule in rules]
