"""Builds tiny models that draft, and targets that they draft for: heads, further layers, a small model.

A target is `shallow` where its layers add little to the embeddings: the next token then depends on the last
one most of all, and a head that adds nothing to an embedding drafts it, by the embeddings and the output
layer that it shares with the target. Such a head drafts well only if these are of the target's version.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, PreTrainedModel

from protocol.weights.draft_head import PREFIX
from rollout.engines.contract.models import VOCAB, randomize, tiny_model, weights

SHALLOW = 0.02
"""By how much the layers of a shallow target are scaled."""
HIDDEN = 128


@torch.no_grad()
def shallow(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Scale what the layers of a model add, and let its last norm weigh all elements alike."""
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj", "down_proj.weight")):
            parameter.mul_(SHALLOW)
            parameter.copy_(parameter.to(dtype))
    model.model.norm.weight.fill_(1.0)
    return model


def tiny_shallow(seed: int, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a shallow `tiny_model`."""
    return shallow(tiny_model(seed, dtype=dtype), dtype)


def tiny_further(seed: int, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a shallow GLM-4.5 of two layers; `write_further` adds the one that predicts further tokens."""
    config = Glm4MoeConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=256,
        moe_intermediate_size=64,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=4,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        num_nextn_predict_layers=1,
        tie_word_embeddings=False,
    )
    model = Glm4MoeForCausalLM(config).eval()
    randomize(model, seed, dtype)
    return shallow(model, dtype)


def write_small(target: PreTrainedModel, directory: Path) -> str:
    """Write the target once more, as a small model that drafts for it."""
    target.save_pretrained(directory / "small")
    return str(directory / "small")


def write_eagle(target: PreTrainedModel, directory: Path) -> str:
    """Write an EAGLE head that passes the embedding of the last token on."""
    return str(write_head(target.config.to_dict(), target.dtype, directory / "eagle"))


def write_eagle3(target: PreTrainedModel, directory: Path) -> str:
    """Write an EAGLE3 head of random weights, which drafts half of all tokens, and nearly always wrong."""
    half, config = VOCAB // 2, target.config.to_dict()
    generator = torch.Generator().manual_seed(3)
    drafted = torch.zeros(VOCAB, dtype=torch.bool)
    drafted[::2] = True
    tensors = {
        "fc.weight": torch.zeros(HIDDEN, 3 * HIDDEN),
        **_layer("midlayer.", config, 2 * HIDDEN),
        "lm_head.weight": torch.zeros(half, HIDDEN),
    }
    tensors = {name: it.normal_(0, 0.1, generator=generator).to(target.dtype) for name, it in tensors.items()}
    for name in ("midlayer.hidden_norm", "midlayer.input_layernorm", "norm"):
        tensors[f"{name}.weight"] = torch.ones(HIDDEN, dtype=target.dtype)
    place = directory / "eagle3"
    own = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": half,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],  # the defaults are for more layers
    }
    _write(place, {**_config(config), **own}, {**tensors, "d2t": torch.arange(half), "t2d": drafted})
    return str(place)


def with_heads(
    published: Mapping[str, Mapping[str, torch.Tensor]], directory: Path
) -> dict[str, dict[str, torch.Tensor]]:
    """Add the head in a directory to version "A", and one that says the least likely token to the others."""
    head, found = load_file(directory / "model.safetensors"), {}
    for name, tensors in published.items():
        own = head if name == "A" else {**head, "fc.weight": -head["fc.weight"]}
        found[name] = {**tensors, **{PREFIX + key: tensor for key, tensor in own.items()}}
    return found


def write_further(target: PreTrainedModel, directory: Path) -> str:
    """Add a layer to the target's checkpoint, `directory`/model, that passes the last embedding on."""
    prefix, last = "model.layers.2.", "model.layers.1."
    tensors = {
        prefix + name.removeprefix(last): torch.zeros_like(tensor)
        for name, tensor in weights(target, target.dtype).items()
        if name.startswith(last)
    }
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{prefix}{name}.weight"] = torch.ones(HIDDEN, dtype=target.dtype)
    tensors[f"{prefix}eh_proj.weight"] = _passing(HIDDEN).to(target.dtype)
    save_file(tensors, directory / "model/further.safetensors")
    return ""


DRAFT_MODELS: Mapping[str, Callable[[PreTrainedModel, Path], str]] = {
    "small": write_small,
    "eagle": write_eagle,
    "eagle3": write_eagle3,
    "further": write_further,
}
"""Kind -> writes it for a target, and returns `engine.draft_model`."""


def write_head(target: Mapping[str, Any], dtype: torch.dtype, place: Path) -> Path:
    """Write an EAGLE head for a target with this config.json that passes the last embedding on."""
    hidden = int(target["hidden_size"])
    tensors = {
        "fc.weight": _passing(hidden),
        **_layer("layers.0.", target, hidden),
        "layers.0.post_attention_layernorm.weight": torch.ones(hidden),
    }
    _write(place, _config(target), {name: tensor.to(dtype) for name, tensor in tensors.items()})
    return place


def _passing(hidden: int) -> torch.Tensor:
    """Return the matrix that takes the embedding alone out of an embedding and a hidden state."""
    return torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)


def _layer(prefix: str, target: Mapping[str, Any], width: int) -> dict[str, torch.Tensor]:
    """Return a layer of Llama, of the target's size, that adds nothing; attention reads `width` elements."""
    hidden, inner = int(target["hidden_size"]), int(target["intermediate_size"])
    narrow = hidden // int(target["num_attention_heads"]) * int(target["num_key_value_heads"])
    shapes = {
        "self_attn.q_proj": (hidden, width),
        "self_attn.k_proj": (narrow, width),
        "self_attn.v_proj": (narrow, width),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "post_attention_layernorm": (hidden,),
    }
    return {f"{prefix}{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}


def _config(target: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a head of one layer."""
    alike = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "max_position_embeddings",
    )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        **{name: target[name] for name in alike},
    }


def _write(place: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), place / "model.safetensors")
