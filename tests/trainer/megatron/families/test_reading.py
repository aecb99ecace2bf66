"""Tests that config.json is read as transformers reads it; what is not supported is refused by name."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from protocol.errors import SettingsError
from tests.trainer.megatron.models import LLAMA3_ROPE, YARN_ROPE, make_model
from trainer.megatron.families.latent import Latent
from trainer.megatron.families.reading import architecture_of, read_architecture
from trainer.megatron.families.rope import Rope
from trainer.megatron.families.table import FAMILIES
from trainer.megatron.layers.attention.rotary import inverse_frequencies
from trainer.megatron.layers.spec import attention_terms

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0 + place / 8 for place in range(16)],
    "long_factor": [2.0 + place for place in range(16)],
}


def write_config(directory: Path, **changes: object) -> Path:
    config = {**make_model("llama").config.to_dict(), **changes}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_an_unsupported_family_is_refused_with_the_supported_ones(tmp_path: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"'gpt2' is not supported; supported are deepseek_v2, .*llama, .*qwen2, .*qwen3"
    ):
        read_architecture(write_config(tmp_path, model_type="gpt2"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mlp_bias", True),  # without attention_bias
        ("use_bias", True),
        ("use_bidirectional_attention", True),
        ("attn_logit_softcapping", 50.0),
        ("query_pre_attn_scalar", 256),
        ("hidden_act", "gelu"),
        ("qk_layernorm", True),
        ("resid_pdrop", 0.1),
        ("attention_dropout", 0.1),
        ("quantization_config", {"bits": 4}),
    ],
)
def test_an_unsupported_field_is_named(tmp_path: Path, field: str, value: object) -> None:
    with pytest.raises(SettingsError, match=field):
        read_architecture(write_config(tmp_path, **{field: value}))


GEMMA_2B = {
    "architectures": ["GemmaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 256,
    "hidden_act": "gelu",
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "max_position_embeddings": 8192,
    "model_type": "gemma",
    "num_attention_heads": 8,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "vocab_size": 256000,
}
PHI_2 = {
    "architectures": ["PhiForCausalLM"],
    "attention_dropout": 0.0,
    "embd_pdrop": 0.0,
    "hidden_act": "gelu_new",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "phi",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "partial_rotary_factor": 0.4,
    "qk_layernorm": False,
    "resid_pdrop": 0.1,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 51200,
}


def test_the_first_gemma_is_read_as_it_was_published() -> None:
    """Its file says gelu, and neither that its embedding is tied nor that it is scaled."""
    found = architecture_of(GEMMA_2B, Path("config.json"))
    assert (found.head_dim, found.tied, found.embedding_scale) == (256, True, 2048**0.5)
    assert (found.window, found.score_scale, found.score_softcap, found.logit_softcap) == (0, 0.0, 0.0, 0.0)


def test_phi_2_is_read_as_it_was_published() -> None:
    """Its file still names the dropout of its pretraining."""
    found = architecture_of(PHI_2, Path("config.json"))
    assert (found.head_dim, found.rope.dimensions(found.head_dim), found.norm_eps) == (80, 32, 1e-5)
    assert found.qkv_bias
    assert found.output_bias
    assert found.biases == ("qkv", "output", "mlp")


def test_a_sliding_window_holds_for_all_layers_or_is_refused(tmp_path: Path) -> None:
    for window, expected in ((8, 8), (None, 0), (128, 0)):
        path = write_config(tmp_path, model_type="mistral", sliding_window=window)
        assert read_architecture(path).window == expected
    unnamed = write_config(tmp_path, model_type="mistral", max_position_embeddings=8192)
    assert read_architecture(unnamed).window == transformers.MistralConfig().sliding_window
    with pytest.raises(SettingsError, match="sliding_window = 8 is not supported in olmo2"):
        read_architecture(
            write_config(tmp_path, model_type="olmo2", sliding_window=8, use_sliding_window=True)
        )


@pytest.mark.parametrize(
    ("changes", "window", "windows"),
    [
        ({"use_sliding_window": False, "max_window_layers": 0}, 0, ()),
        ({"use_sliding_window": True}, 0, ()),  # max_window_layers is 28
        ({"use_sliding_window": True, "max_window_layers": 0}, 8, ()),
        ({"use_sliding_window": True, "max_window_layers": 1}, 0, (0, 8)),
        ({"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}, 0, (8, 0)),
    ],
)
def test_a_switched_window_holds_for_the_layers_that_are_named(
    tmp_path: Path, changes: dict[str, object], window: int, windows: tuple[int, ...]
) -> None:
    found = read_architecture(write_config(tmp_path, model_type="qwen2", sliding_window=8, **changes))
    assert (found.window, found.windows) == (window, windows)
    assert [found.window_of(layer) for layer in (0, 1)] == list(windows or (window, window))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"model_type": "mistral", "layer_types": ["sliding_attention", "full_attention"]},
            "layers are alike",
        ),
        ({"model_type": "ministral", "layer_types": ["sliding_attention"]}, "must name 2 layers"),
        ({"model_type": "ministral", "layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
        ({"model_type": "llama", "layer_types": ["sliding_attention"] * 2}, "not supported in llama"),
    ],
)
def test_kinds_of_layers_that_the_family_does_not_have_are_refused(
    tmp_path: Path, changes: dict[str, object], named: str
) -> None:
    with pytest.raises(SettingsError, match=named):
        read_architecture(write_config(tmp_path, sliding_window=8, **changes))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_fields_that_are_not_named_are_as_in_transformers(tmp_path: Path, model_type: str) -> None:
    config = transformers.CONFIG_MAPPING[model_type]().to_dict()
    if "num_experts_per_tok" in config:
        config["num_experts_per_tok"] = 2  # transformers has none for DeepSeek-V2
    whole = architecture_of(config, tmp_path)
    left_out = {*FAMILIES[model_type].defaults, "layer_types", "max_window_layers"}
    assert architecture_of({key: config[key] for key in config.keys() - left_out}, tmp_path) == whole


def test_gemma_3_has_a_rope_for_layers_with_a_window_in_old_and_new_checkpoints(tmp_path: Path) -> None:
    old = {
        "rope_theta": 5e5,
        "rope_local_base_freq": 2e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    config = {**transformers.Gemma3TextConfig(**old).to_dict(), "sliding_window_pattern": 6}
    new = architecture_of(config, tmp_path)
    assert (new.rope.theta, new.rope.type, new.rope.factor) == (5e5, "linear", 8.0)
    assert (new.local_rope, [new.rope_of(layer) for layer in range(6)]) == (Rope(2e4), [1] * 5 + [0])
    del config["rope_parameters"]
    assert architecture_of({**config, **old}, tmp_path) == new
    with pytest.raises(SettingsError, match="rope_parameters must name full_attention and sliding_attention"):
        architecture_of({**config, "rope_parameters": {"rope_theta": 1e4}}, tmp_path)


@pytest.mark.parametrize(
    ("model_type", "rope", "named"),
    [
        ("llama", {"rope_type": "dynamic", "factor": 2.0}, "rope_parameters of type 'dynamic'"),
        ("phi3", {"rope_type": "longrope"}, "rope_parameters has 0 numbers in short_factor, not 16"),
        ("phi3", {"type": "su", "short_mscale": 1.2}, "rope_parameters with short_mscale"),
        ("phi3", {"rope_type": "linear", "partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("llama", {"partial_rotary_factor": 0.75}, "partial_rotary_factor = 0.75"),
        ("llama", {"rope_type": "linear", "factor": "2"}, "factor = '2' must be a number"),
        ("phi3", {"rope_type": "longrope", "short_factor": ["x"] * 16}, "has 0 numbers in short_factor"),
    ],
)
def test_an_unsupported_rope_is_refused(
    tmp_path: Path, model_type: str, rope: dict[str, object], named: str
) -> None:
    path = write_config(tmp_path, model_type=model_type, rope_parameters={"rope_theta": 1e4, **rope})
    with pytest.raises(SettingsError, match=named):
        read_architecture(path)


@pytest.mark.parametrize("quantized", [{"quant_method": "mxfp4"}, {"quant_method": "fp8", "bits": 8}])
def test_a_quantized_checkpoint_is_refused_with_what_to_use(tmp_path: Path, quantized: object) -> None:
    with pytest.raises(SettingsError, match=r"stored as '(mxfp4|fp8)'; use a copy .* in bfloat16"):
        read_architecture(write_config(tmp_path, quantization_config=quantized))


@pytest.mark.parametrize("rank", [None, 24])
def test_latent_attention_has_its_sizes_and_scale(tmp_path: Path, rank: int | None) -> None:
    model = make_model("deepseek-v3-dense", q_lora_rank=rank)
    model.config.save_pretrained(tmp_path)
    found = read_architecture(tmp_path)
    assert found.latent == Latent(16, nope=16, rope=8, value=12, query_rank=rank or 0)
    assert (found.head_dim, found.value_dim, found.positioned_dim, found.kv_heads) == (24, 12, 8, 4)
    attention = model.model.layers[0].self_attn
    assert attention_terms(found, 0).scale == pytest.approx(attention.scaling)
    assert found.rope.attention_factor == pytest.approx(model.model.rotary_emb.attention_scaling)
    names = [name for name, _ in model.named_parameters() if ".layers." in name]
    matrices = sum(p.numel() for name, p in model.named_parameters() if name in names and p.ndim == 2)
    products = 3 * found.layers * 4 * (24 + 12) * 10**2
    assert found.layer_flops(10) == 6 * matrices * 10 + products


def test_latent_attention_with_fewer_key_value_heads_is_refused(tmp_path: Path) -> None:
    config = make_model("deepseek-v3-dense").config.to_dict()
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 2}))
    with pytest.raises(SettingsError, match="num_key_value_heads = 2 is not supported with latent"):
        read_architecture(tmp_path)


def test_a_missing_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot read .*config\.json"):
        read_architecture(tmp_path)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 5e5},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        LLAMA3_ROPE,
        YARN_ROPE,
        {**YARN_ROPE, "original_max_position_embeddings": 4096, "truncate": False, "beta_fast": 16.0},
        {**YARN_ROPE, "attention_factor": 1.5, "original_max_position_embeddings": 4096},
        {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 0.5},
        LONGROPE,
    ],
)
@pytest.mark.parametrize("old_style", [False, True])
def test_rope_frequencies_equal_those_of_transformers(
    tmp_path: Path, rope: dict[str, object], old_style: bool
) -> None:
    if old_style:
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        path = write_config(
            tmp_path, rope_parameters=None, rope_scaling=scaling, rope_theta=rope["rope_theta"]
        )
    else:
        path = write_config(tmp_path, rope_parameters=rope)
    found = read_architecture(path).rope
    config = transformers.LlamaConfig(**{**make_model("llama").config.to_dict(), "rope_parameters": rope})
    if rope["rope_type"] == "default":
        expected, factor = 1.0 / rope["rope_theta"] ** (torch.arange(0, 32, 2).float() / 32), 1.0
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    torch.testing.assert_close(inverse_frequencies(found, 32), expected, atol=0, rtol=1e-6)
    assert found.attention_factor == pytest.approx(factor)
    if found.long_factor:
        expected, _ = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), seq_len=33)
        torch.testing.assert_close(inverse_frequencies(found, 32, long=True), expected, atol=0, rtol=1e-6)


def test_flops_are_those_of_the_matrices_and_of_causal_attention(tmp_path: Path) -> None:
    spec = read_architecture(write_config(tmp_path))
    found = sum(
        parameter.numel()
        for name, parameter in make_model("llama").named_parameters()
        if ".layers." in name and parameter.ndim == 2
    )
    attention = spec.layers * spec.heads * spec.head_dim * 6 * 10**2
    assert spec.layer_flops(10) == 6 * found * 10 + attention
    assert spec.layer_flops(10, frozen=True) == 4 * found * 10 + attention
    head = spec.hidden * spec.vocabulary
    assert (spec.head_flops(3), spec.head_flops(3, frozen=True)) == (18 * head, 12 * head)


def test_flops_of_a_window_are_those_of_the_pairs_in_it(tmp_path: Path) -> None:
    whole = read_architecture(write_config(tmp_path))
    window = dataclasses.replace(whole, window=4)
    lengths = torch.tensor([3, 4, 10]).double()
    saved = (whole.layer_flops(lengths) - window.layer_flops(lengths)).tolist()
    pair = 12 * whole.layers * whole.heads * whole.head_dim
    assert saved == [0, 0, pair * 6**2 / 2]
    assert whole.layer_flops(10) - window.layer_flops(10) == saved[-1]
    alternating = dataclasses.replace(whole, windows=(0, 4))
    assert whole.layer_flops(10) - alternating.layer_flops(10) == saved[-1] / 2


@pytest.mark.parametrize(
    ("model", "field", "value"),
    [
        ("deepseek-v2", "norm_topk_prob", True),
        ("deepseek-v2", "topk_method", "noaux_tc"),
        ("deepseek-v3", "scoring_func", "softmax"),
        ("deepseek-v3", "n_group", 3),
    ],
)
def test_another_choice_of_experts_is_refused_by_its_field(
    tmp_path: Path, model: str, field: str, value: object
) -> None:
    config = {**make_model(model).config.to_dict(), field: value}
    with pytest.raises(SettingsError, match=f"{field} = {value!r}"):
        architecture_of(config, tmp_path)


def test_gpt_oss_has_the_numbers_of_its_config(tmp_path: Path) -> None:
    config = make_model("gpt-oss").config.to_dict()
    found = architecture_of(config, tmp_path)
    assert (found.windows, found.biases, found.rope.truncate) == ((5, 0), ("qkv", "output"), False)
    assert (found.experts.swiglu_limit, found.experts.swiglu_alpha) == (0.5, 1.702)
    assert attention_terms(found, 1).sinks


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"layer_types": ["linear_attention", "sliding_attention"]},
            "layer_types must name 2 layers, each li",
        ),
        ({"linear_num_key_heads": 3}, "linear_num_key_heads = 3 does not divide the 4"),
    ],
)
def test_a_hybrid_of_other_layers_or_heads_is_refused(
    tmp_path: Path, changes: dict[str, object], named: str
) -> None:
    with pytest.raises(SettingsError, match=named):
        architecture_of({**make_model("qwen3.5").config.to_dict(), **changes}, tmp_path)


def test_glm4_moe_may_lack_norms_of_queries_and_keys(tmp_path: Path) -> None:
    config = make_model("glm4-moe").config.to_dict()
    found = architecture_of(config, tmp_path)
    assert (found.qk_norm, found.rope.dimensions(found.head_dim)) == ("head", 16)
    assert architecture_of({**config, "use_qk_norm": False}, tmp_path).qk_norm == ""
