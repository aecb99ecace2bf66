"""Makes a small random model and its tokenizer, for tests, demos and runs without a hub."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from protocol.choices import checked_name
from protocol.device.hf_build_lock import MODEL_BUILDING
from protocol.errors import SettingsError
from protocol.host.atomic_file import directory_written_aside
from trainer.config import ScratchConfig

ARCHITECTURES = ("llama", "qwen2", "qwen3")
SPECIALS = ("<pad>", "<eos>")
RECIPE = "scratch.json"
"""File with the configuration that a directory was made from."""


def build_scratch(config: ScratchConfig, out_dir: Path) -> Path:
    """Write model and tokenizer as a Hugging Face directory, unless it is there already, and return it.

    The same configuration gives the same bytes.

    Raises:
        SettingsError: the configuration makes no model, or `out_dir` was made from another one.
    """
    check_scratch(config, out_dir)
    if out_dir.exists():
        return out_dir
    temporary = out_dir.with_name(f"{out_dir.name}.{os.getpid()}.tmp")  # others may make the same model now
    with directory_written_aside(out_dir, aside=temporary) as aside:
        _model(config).save_pretrained(aside)
        _tokenizer(config).save_pretrained(aside)
        (aside / RECIPE).write_text(_recipe(config))
    return out_dir


def write_tokenizer(config: ScratchConfig, out_dir: Path) -> None:
    """Write the files of the model's tokenizer alone into an existing directory."""
    _tokenizer(config).save_pretrained(out_dir)


def check_scratch(config: ScratchConfig, out_dir: Path) -> None:
    """Check what `build_scratch` would be given, without making anything; its errors are the same."""
    _check_config(config)
    found = out_dir / RECIPE
    if out_dir.exists() and (not found.is_file() or found.read_text() != _recipe(config)):
        raise SettingsError(
            f"{out_dir} holds something else than this [model.scratch]: remove it, or use another run "
            "directory"
        )


def vocabulary_size(config: ScratchConfig) -> int:
    """Return how many tokens the model has."""
    return len(SPECIALS) + len(config.vocabulary)


def _recipe(config: ScratchConfig) -> str:
    return json.dumps(dataclasses.asdict(config), indent=1, sort_keys=True)


def _check_config(config: ScratchConfig) -> None:
    checked_name(config.architecture, ARCHITECTURES, "setting model.scratch.architecture:")
    if not config.vocabulary or len(set(config.vocabulary)) != len(config.vocabulary):
        raise SettingsError(f"model.scratch.vocabulary {config.vocabulary!r}: give each character once")
    strange = sorted({c for c in config.vocabulary if not (c.isascii() and c.isprintable()) and c != "\n"})
    if strange:
        raise SettingsError(
            f"model.scratch.vocabulary has {strange}: only printable ASCII and the newline can be tokens"
        )
    if config.num_attention_heads % config.num_key_value_heads:
        raise SettingsError(
            f"model.scratch.num_attention_heads {config.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {config.num_key_value_heads}"
        )


def _model(config: ScratchConfig) -> Any:
    # Imported here: a run that is started again has its model, and this takes seconds.
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    shape = dataclasses.asdict(config)
    for name in ("architecture", "vocabulary", "seed", "rope_theta"):
        del shape[name]
    hf = AutoConfig.for_model(
        config.architecture,
        **shape,
        vocab_size=vocabulary_size(config),
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    with MODEL_BUILDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return AutoModelForCausalLM.from_config(hf, dtype=torch.float32)


def _tokenizer(config: ScratchConfig) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token for each character; it drops characters outside of the vocabulary.

    It is byte-level BPE without merges, because transformers reads the file of any `qwen2` model as that.
    """
    letters = {**{chr(code): chr(code) for code in range(33, 127)}, " ": "\u0120", "\n": "\u010a"}
    tokens = {
        token: index
        for index, token in enumerate((*SPECIALS, *(letters[character] for character in config.vocabulary)))
    }
    tokenizer = Tokenizer(models.BPE(tokens, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIALS[0],
        eos_token=SPECIALS[1],
        unk_token=SPECIALS[0],  # never produced; without it transformers adds one to a qwen2 vocabulary
        model_max_length=config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )
