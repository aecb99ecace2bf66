"""Lists the layouts that tests train in, the models that each trains, and which checkpoints go where."""

from tests.trainer.megatron.models import DEEP_MODELS, MODELS, MORE_MODELS
from trainer.config import ParallelConfig

LAYOUTS = {
    "single": ParallelConfig(),
    "single-more": ParallelConfig(),
    "tp2": ParallelConfig(tensor_model_parallel_size=2),
    "tp2-more": ParallelConfig(tensor_model_parallel_size=2),
    "tp2-sequence": ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True),
    "tp2-sequence-more": ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True),
    "pp2": ParallelConfig(pipeline_model_parallel_size=2),
    "dp2": ParallelConfig(data_parallel_size=2),
    "dp2-replicated": ParallelConfig(data_parallel_size=2, use_distributed_optimizer=False),
    "tp2-pp2": ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2),
    "tp2-dp2": ParallelConfig(tensor_model_parallel_size=2, data_parallel_size=2),
    "cp2": ParallelConfig(context_parallel_size=2),
    "cp2-dp2": ParallelConfig(context_parallel_size=2, data_parallel_size=2),
    "cp2-pp2": ParallelConfig(context_parallel_size=2, pipeline_model_parallel_size=2),
    "tp2-cp2": ParallelConfig(tensor_model_parallel_size=2, context_parallel_size=2, sequence_parallel=True),
}
EXPERT_LAYOUTS = {
    "ep2": ParallelConfig(data_parallel_size=2, expert_model_parallel_size=2),
    "etp2": ParallelConfig(
        tensor_model_parallel_size=2, sequence_parallel=True, expert_tensor_parallel_size=2
    ),
    "tp2-ep2": ParallelConfig(
        tensor_model_parallel_size=2, sequence_parallel=True, expert_model_parallel_size=2
    ),
    "cp2-ep2": ParallelConfig(context_parallel_size=2, expert_model_parallel_size=2),
    "ep2-pp2": ParallelConfig(
        pipeline_model_parallel_size=2, data_parallel_size=2, expert_model_parallel_size=2
    ),
    "tp2-dp2-ep2": ParallelConfig(
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        data_parallel_size=2,
        expert_model_parallel_size=2,
    ),
    "ep2-etp2-replicated": ParallelConfig(
        data_parallel_size=4,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=2,
        use_distributed_optimizer=False,
    ),
}
"""Only models with experts are trained in them."""
LAYOUTS |= EXPERT_LAYOUTS
OTHER_KINDS = ("qwen3-moe", "gpt-oss", "deepseek-v3", "qwen3.5")
"""One model each with experts, sinks, latent attention and delta nets."""
MORE_MODELS_OF = {
    "single": OTHER_KINDS,
    "single-more": tuple(name for name in MORE_MODELS if name not in OTHER_KINDS),
    "tp2-more": ("deepseek-v3-dense", "qwen3.5"),
    "tp2-sequence": (
        "olmo2",
        "phi3",
        "qwen2-moe",
        "gpt-oss",
        "gemma2",
        "starcoder2",
        "deepseek-v3",
        "deepseek-v2-dense",
        "phi",
        "qwen3-next",
    ),
    "tp2-sequence-more": (
        "mistral",
        "glm4-moe",
        "gemma",
        "gemma3",
        "glm4",
        "qwen3-windows",
        "deepseek-v3-dense",
    ),
    "pp2": ("gemma2", "phi"),
    "cp2": ("phi", "mistral", "gemma2", "qwen3-moe", "deepseek-v3-dense"),
}
"""Layout -> models that it trains beside `MODELS`. "tp2-sequence" has a model for each way to split a tensor,
and "-more" further families with the same ways."""
DEEP_LAYOUTS = {
    "pp2-uneven": ParallelConfig(pipeline_model_parallel_size=2, num_layers_in_first_pipeline_stage=1),
    "pp2-vpp2": ParallelConfig(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2),
    "pp4": ParallelConfig(pipeline_model_parallel_size=4),
    "pp2-vpp2-dp2": ParallelConfig(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, data_parallel_size=2
    ),
    "tp2-pp2-vpp2": ParallelConfig(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        sequence_parallel=True,
    ),
    "pp2-uneven-tp2": ParallelConfig(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, num_layers_in_last_pipeline_stage=1
    ),
}
"""With models of four layers."""
LAYOUTS |= DEEP_LAYOUTS
FROM = {
    "tp2": ("single",),
    "pp2": ("tp2",),
    "dp2": ("single",),
    "dp2-replicated": ("dp2",),
    "tp2-pp2": ("single", "dp2"),
    "tp2-dp2": ("tp2-pp2", "dp2-replicated"),
    "ep2": ("single",),
    "tp2-ep2": ("ep2",),
    "pp2-uneven": ("pp2-vpp2",),
    "cp2": ("single", "pp2"),
}
"""Layouts whose checkpoints are restored in another one, which is launched after them."""
BACK = ("tp2", "pp2", "dp2")
"""Layouts whose checkpoints are restored in the single rank of the test."""
EXPERTS = ("qwen3-moe", "mixtral", "qwen2-moe", "deepseek-v3", "gpt-oss")
"""Models with experts."""
SLOW = frozenset({"tp2-sequence-more", "dp2-replicated", "pp2-uneven", "etp2", "tp2-ep2", "cp2-ep2"})
"""Layouts of two ranks whose tests take too long for every run, as those of more ranks do."""
DEAR = frozenset({"single-more", "tp2-more", "tp2-sequence", "pp2", "cp2", "ep2", "pp2-vpp2"})
"""Layouts that are trained where a file changed on which training with Megatron depends: "single" has a model
of each kind, and "tp2" and "dp2" divide tensors and samples."""


def models_of(layout: str) -> list[str]:
    """Names of the models that are trained in a layout."""
    if layout in EXPERT_LAYOUTS:
        return [*EXPERTS] if LAYOUTS[layout].world_size > 2 else [*EXPERTS[:2]]
    return [*DEEP_MODELS] if layout in DEEP_LAYOUTS else [*MODELS, *MORE_MODELS_OF.get(layout, ())]


def tied_model_of(layout: str) -> str:
    """Name of one of them whose embedding is the output layer, with a vocabulary of odd size."""
    return "qwen3-deep" if layout in DEEP_LAYOUTS else "qwen3-tied"


def one_of(layout: str) -> str:
    """Name of the model that is trained in other ways, too."""
    return "qwen3-moe" if layout in EXPERT_LAYOUTS else tied_model_of(layout)


def restored_in(source: str, layout: str) -> dict[str, tuple[str, str]]:
    """Directory of a checkpoint -> dtype and model, of those that are moved from one layout to another."""
    if one_of(source) != one_of(layout):  # what both train
        (name,) = {one_of(source), one_of(layout)} - {"qwen3-tied"}
        return {name: ("float32", name)}
    name = "qwen2-deep" if layout in DEEP_LAYOUTS else "mixtral" if layout in EXPERT_LAYOUTS else "qwen2"
    return {
        name: ("float32", name),
        "bfloat16": ("bfloat16", one_of(layout)),
        "float16": ("float16", one_of(layout)),
    }
