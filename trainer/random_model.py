"""Creates a small random model and its tokenizer, for tests, demos and runs without a hub.

The module imports neither torch nor transformers: both take seconds to import, which would delay every new
run.
"""

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from protocol.choices import checked_name
from protocol.errors import SettingsError
from protocol.host.atomic_file import directory_written_aside
from trainer.config import ScratchConfig
from trainer.megatron.families.table import FAMILIES

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3_moe")
EXPERT_FIELDS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
"""Fields of architectures with experts only."""
SPECIALS = ("<pad>", "<eos>")
PAD, EOS = range(2)
RECIPE = "scratch.json"
"""File that stores the configuration of a directory's model."""


def build_scratch(config: ScratchConfig, out_dir: Path) -> Path:
    """Write model and tokenizer to a Hugging Face directory, unless they exist, and return the directory.

    The same configuration gives the same bytes.

    Raises:
        SettingsError: the configuration is invalid, or `out_dir` belongs to another configuration.
    """
    from safetensors.numpy import save_file  # processes that only prepare a run import this module

    check_scratch(config, out_dir)
    if out_dir.exists():
        return out_dir
    temporary = out_dir.with_name(f"{out_dir.name}.{os.getpid()}.tmp")  # another process may write it, too
    with directory_written_aside(out_dir, aside=temporary) as aside:
        _write_json(aside / "config.json", config_of(config))
        _write_json(aside / "generation_config.json", {"eos_token_id": EOS, "pad_token_id": PAD})
        save_file(dict(_tensors(config)), aside / "model.safetensors", metadata={"format": "pt"})
        write_tokenizer(config, aside)
        (aside / RECIPE).write_text(_recipe(config))
    return out_dir


def write_tokenizer(config: ScratchConfig, out_dir: Path) -> None:
    """Write only the tokenizer's files into an existing directory."""
    _tokenizer(config).save(str(out_dir / "tokenizer.json"))
    about = {
        "backend": "tokenizers",
        "clean_up_tokenization_spaces": False,
        "eos_token": SPECIALS[EOS],
        "model_max_length": config.max_position_embeddings,
        "pad_token": SPECIALS[PAD],
        "tokenizer_class": "TokenizersBackend",
        "unk_token": SPECIALS[PAD],  # unused; without it transformers adds a token to a qwen2 vocabulary
    }
    _write_json(out_dir / "tokenizer_config.json", about)


def check_scratch(config: ScratchConfig, out_dir: Path) -> None:
    """Validate the arguments of `build_scratch` without writing; raises the same errors."""
    _check_config(config)
    found = out_dir / RECIPE
    if out_dir.exists() and (not found.is_file() or found.read_text() != _recipe(config)):
        raise SettingsError(
            f"{out_dir} contains a model of another [model.scratch]: remove it, or use another run directory"
        )


def config_of(config: ScratchConfig) -> dict[str, Any]:
    """Return the content of the model's config.json."""
    shape = _fields(config)
    for name in ("architecture", "vocabulary", "seed", "rope_theta"):
        del shape[name]
    if config.architecture == "qwen3_moe":
        shape |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    return {
        **shape,
        "architectures": [FAMILIES[config.architecture].name],
        "model_type": config.architecture,
        "dtype": "float32",
        "vocab_size": len(SPECIALS) + len(config.vocabulary),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_dropout": 0.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "use_cache": True,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "bos_token_id": None,
    }


def _fields(config: ScratchConfig) -> dict[str, Any]:
    """Return the fields of the configuration's architecture."""
    values = dataclasses.asdict(config)
    if config.architecture != "qwen3_moe":
        for name in EXPERT_FIELDS:
            del values[name]
    return values


def _recipe(config: ScratchConfig) -> str:
    return json.dumps(_fields(config), indent=1, sort_keys=True)


def _check_config(config: ScratchConfig) -> None:
    checked_name(config.architecture, ARCHITECTURES, "setting model.scratch.architecture:")
    if not config.vocabulary or len(set(config.vocabulary)) != len(config.vocabulary):
        raise SettingsError(f"model.scratch.vocabulary {config.vocabulary!r}: give each character once")
    strange = sorted({c for c in config.vocabulary if not (c.isascii() and c.isprintable()) and c != "\n"})
    if strange:
        raise SettingsError(
            f"model.scratch.vocabulary has {strange}: only printable ASCII and the newline can be tokens"
        )
    if config.num_experts_per_tok > config.num_experts:
        raise SettingsError(
            f"model.scratch.num_experts_per_tok {config.num_experts_per_tok} is more than num_experts "
            f"{config.num_experts}"
        )
    if config.num_attention_heads % config.num_key_value_heads:
        raise SettingsError(
            f"model.scratch.num_attention_heads {config.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {config.num_key_value_heads}"
        )


def _tensors(config: ScratchConfig) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield name and value of each tensor: matrices random, biases and the row of `<pad>` 0, norms 1."""
    random = np.random.Generator(np.random.PCG64(config.seed))
    for name, shape in shapes_of(config):
        tensor = np.full(shape, 0.0 if name.endswith(".bias") else 1.0, np.float32)
        if len(shape) == 2:
            tensor = random.standard_normal(shape, np.float32) * np.float32(config.initializer_range)
        if name == "model.embed_tokens.weight":
            tensor[PAD] = 0.0
        yield name, tensor


def shapes_of(config: ScratchConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of each tensor, as in the model's transformers class."""
    hidden, wide, head = config.hidden_size, config.intermediate_size, config.head_dim
    columns = {"q": config.num_attention_heads * head}
    columns["k"] = columns["v"] = config.num_key_value_heads * head
    tables = ["model.embed_tokens.weight"] + ["lm_head.weight"] * (not config.tie_word_embeddings)
    for table in tables:
        yield table, (len(SPECIALS) + len(config.vocabulary), hidden)
    for layer in range(config.num_hidden_layers):
        here = f"model.layers.{layer}."
        for kind, size in columns.items():
            yield f"{here}self_attn.{kind}_proj.weight", (size, hidden)
            if config.architecture == "qwen2":
                yield f"{here}self_attn.{kind}_proj.bias", (size,)
            if config.architecture.startswith("qwen3") and kind != "v":
                yield f"{here}self_attn.{kind}_norm.weight", (head,)
        yield f"{here}self_attn.o_proj.weight", (hidden, columns["q"])
        if config.architecture == "qwen3_moe":
            yield f"{here}mlp.gate.weight", (config.num_experts, hidden)
            for expert in range(config.num_experts):
                yield from _mlp(f"{here}mlp.experts.{expert}.", hidden, config.moe_intermediate_size)
        else:
            yield from _mlp(f"{here}mlp.", hidden, wide)
        yield f"{here}input_layernorm.weight", (hidden,)
        yield f"{here}post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)


def _mlp(here: str, hidden: int, wide: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{here}gate_proj.weight", (wide, hidden)
    yield f"{here}up_proj.weight", (wide, hidden)
    yield f"{here}down_proj.weight", (hidden, wide)


def _tokenizer(config: ScratchConfig) -> Tokenizer:
    """Return a tokenizer with one token per character, which drops characters outside the vocabulary.

    The tokenizer is byte-level BPE without merges, because transformers reads the file of every `qwen2` model
    as such.
    """
    letters = {**{chr(code): chr(code) for code in range(33, 127)}, " ": "\u0120", "\n": "\u010a"}
    tokens = {
        token: index
        for index, token in enumerate((*SPECIALS, *(letters[character] for character in config.vocabulary)))
    }
    tokenizer = Tokenizer(models.BPE(tokens, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return tokenizer


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
