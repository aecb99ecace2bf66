"""The models that are moved: directories with a config.json and no weights, which engine and trainer fill at
random on their devices."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Size:
    """A model, and the load that its engine decodes."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool
    dtype: str
    max_model_len: int
    requests: int
    """Decoded at a time, one of them streamed."""
    experts: int = 0
    """Experts of each layer, in the shape of Qwen3-MoE; 0: none, in the shape of Qwen2."""
    chosen: int = 8
    """Experts of each token."""
    head: int = 0
    """Width of a head; 0: a head's share of `hidden`."""

    @property
    def held(self) -> bool:
        """Whether the trainer's side holds the weights: elsewhere the engine leaves no room for them."""
        return not self.experts


SIZES = {
    "30b-a3b": Size(2048, 768, 48, 32, 4, 151936, False, "bfloat16", 2048, 32, experts=128, head=128),
    "7b": Size(3584, 18944, 28, 28, 4, 152064, False, "bfloat16", 4096, 64),
    "3b": Size(2048, 11008, 36, 16, 2, 151936, True, "bfloat16", 4096, 64),
    "0.5b": Size(896, 4864, 24, 14, 2, 151936, True, "bfloat16", 4096, 64),
    "tiny": Size(128, 256, 2, 4, 2, 512, False, "float32", 1024, 8),
    "tiny-a3b": Size(128, 64, 2, 4, 2, 512, False, "float32", 1024, 8, experts=8, chosen=2, head=32),
}
"""Shapes of Qwen3-30B-A3B (`intermediate` is an expert's), of Qwen2.5-7B, -3B and -0.5B, and two for a
rehearsal on a CPU."""
PROMPT = 32
"""Tokens of each prompt."""


def write_model(name: str, directory: Path, layers: int = 0) -> Path:
    """Write the config.json of a size, or of so many of its layers, into `directory` and return it."""
    from transformers import AutoConfig

    size = SIZES[name]
    expert_fields = {
        "moe_intermediate_size": size.intermediate,
        "num_experts": size.experts,
        "num_experts_per_tok": size.chosen,
        "head_dim": size.head,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    config: Any = AutoConfig.for_model(
        "qwen3_moe" if size.experts else "qwen2",
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=layers or size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        vocab_size=size.vocabulary,
        tie_word_embeddings=size.tied,
        max_position_embeddings=max(size.max_model_len, 4096),
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        **(expert_fields if size.experts else {}),
    )
    config.architectures = ["Qwen3MoeForCausalLM" if size.experts else "Qwen2ForCausalLM"]
    config.dtype = size.dtype
    directory.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(directory)
    return directory


def shapes_of(name: str) -> list[tuple[int, ...]]:
    """Shapes of a size's tensors in the order of a checkpoint, without transformers."""
    size = SIZES[name]
    hidden, inner = size.hidden, size.intermediate
    kv = hidden // size.heads * size.kv_heads
    layer = [(hidden, hidden), (hidden,), (kv, hidden), (kv,), (kv, hidden), (kv,), (hidden, hidden)]
    layer += [(inner, hidden), (inner, hidden), (hidden, inner), (hidden,), (hidden,)]
    ends = [(size.vocabulary, hidden)]
    return ends + layer * size.layers + [(hidden,)] + ([] if size.tied else ends)


def device() -> torch.device:
    """The device that this process measures on."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def settle() -> None:
    """Wait for everything that is queued on the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def group_backend() -> str:
    """Return the backend of torch's process groups."""
    return "nccl" if torch.cuda.is_available() else "gloo"
