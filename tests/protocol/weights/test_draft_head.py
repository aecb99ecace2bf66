"""Tests the names of a draft head's tensors against the layer of transformers that it has."""

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from protocol.weights.draft_head import PREFIX, has_head, head_shapes, without_head


def test_head_has_the_tensors_of_a_layer_of_llama_without_its_first_norm() -> None:
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    with torch.device("meta"):
        layer = LlamaDecoderLayer(LlamaConfig(**sizes), 0)
    expected = {f"layers.0.{name}": tuple(it.shape) for name, it in layer.named_parameters()}
    del expected["layers.0.input_layernorm.weight"]
    assert head_shapes(sizes) == expected | {"fc.weight": (48, 96)}
    wide = head_shapes({**sizes, "head_dim": 32})
    assert wide["layers.0.self_attn.k_proj.weight"] == (64, 48)
    assert wide["layers.0.self_attn.o_proj.weight"] == (48, 128)


def test_head_of_a_version_is_told_from_its_model() -> None:
    version = {"model.fc.weight": 1, f"{PREFIX}fc.weight": 2}
    assert has_head(version)
    assert not has_head(without_head(version))
    assert without_head(version) == {"model.fc.weight": 1}
