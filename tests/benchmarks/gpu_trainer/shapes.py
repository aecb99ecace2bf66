"""Defines the models and the batch that trainers are compared on: random weights and tokens, real shapes."""

import gc
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

SHAPES: dict[str, dict[str, int]] = {
    "0.5b": {"hidden": 896, "intermediate": 4864, "layers": 24, "heads": 14, "kv_heads": 2},
    "1.5b": {"hidden": 1536, "intermediate": 8960, "layers": 28, "heads": 12, "kv_heads": 2},
    "7b": {"hidden": 3584, "intermediate": 18944, "layers": 28, "heads": 28, "kv_heads": 4},
    "small": {"hidden": 512, "intermediate": 2048, "layers": 6, "heads": 8, "kv_heads": 2},
    "tiny": {"hidden": 64, "intermediate": 96, "layers": 2, "heads": 4, "kv_heads": 2},
    "30b-a3b-slice": {
        "hidden": 2048,
        "intermediate": 768,
        "layers": 4,
        "heads": 32,
        "kv_heads": 4,
        "head_dim": 128,
        "experts": 128,
        "experts_per_token": 8,
    },
    "tiny-experts": {
        "hidden": 64,
        "intermediate": 32,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "experts": 8,
        "experts_per_token": 2,
    },
}
"""Shapes of Qwen2.5, and 4 of the 48 layers of Qwen3-30B-A3B with the width of an expert; `small` and
the `tiny` ones are for tests and rehearsals."""
VOCABULARY = 151_936
PROMPT, MEAN, LONGEST = 256, 700, 4096
"""Tokens of a prompt; mean and limit of the responses, which are log-normal with sigma 1."""


@dataclass(frozen=True, slots=True)
class Work:
    """The samples of a step."""

    lengths: np.ndarray[Any, np.dtype[np.int64]]
    """[n] tokens, prompts included."""
    tokens: list[torch.Tensor]
    """int32 [length] for each sample."""

    @property
    def total(self) -> int:
        return int(self.lengths.sum())

    @property
    def trained(self) -> int:
        return int((self.lengths - PROMPT).sum())


def make_work(samples: int, vocabulary: int = VOCABULARY) -> Work:
    """Return samples of long-tailed lengths, the same on every call."""
    rng = np.random.default_rng(0)
    responses = np.clip(rng.lognormal(np.log(MEAN) - 0.5, 1.0, samples).astype(np.int64), 8, LONGEST)
    generator = torch.Generator().manual_seed(0)
    lengths = PROMPT + responses
    tokens = [torch.randint(10, vocabulary, (int(n),), generator=generator).int() for n in lengths]
    return Work(lengths, tokens)


def model_flops(name: str, work: Work) -> float:
    """Return what a step has to compute: three passes, causal attention, logits of trained tokens alone."""
    shape = SHAPES[name]
    hidden, layers, head_dim = shape["hidden"], shape["layers"], _head_dim(shape)
    attention_weights = 2 * hidden * head_dim * (shape["heads"] + shape["kv_heads"])
    mlp_weights = 3 * hidden * shape["intermediate"] * shape.get("experts_per_token", 1)
    layer_weights = attention_weights + mlp_weights + hidden * shape.get("experts", 0)
    scores = float((work.lengths.astype(float) ** 2).sum()) * 6 * layers * shape["heads"] * head_dim
    return 6.0 * layer_weights * layers * work.total + 6.0 * hidden * VOCABULARY * work.trained + scores


def _head_dim(shape: dict[str, int]) -> int:
    return shape.get("head_dim", shape["hidden"] // shape["heads"])


def _config_of(name: str) -> Any:
    from transformers import Qwen2Config, Qwen3MoeConfig

    shape = SHAPES[name]
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": shape["hidden"],
        "intermediate_size": shape["intermediate"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "tie_word_embeddings": name != "7b",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
    }
    if "experts" not in shape:
        return Qwen2Config(**sizes)
    return Qwen3MoeConfig(
        **sizes | {"tie_word_embeddings": False},
        head_dim=shape["head_dim"],
        moe_intermediate_size=shape["intermediate"],
        num_experts=shape["experts"],
        num_experts_per_tok=shape["experts_per_token"],
        norm_topk_prob=True,
    )


def model_directory(name: str, root: Path) -> Path:
    """Write a random model in bfloat16, unless it is there."""
    from transformers import AutoModelForCausalLM

    directory = root / name
    if (directory / "done").exists():
        return directory
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(_config_of(name), dtype=torch.bfloat16)
    model.save_pretrained(directory)
    del model
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    (directory / "done").write_text(json.dumps(SHAPES[name]))
    return directory
