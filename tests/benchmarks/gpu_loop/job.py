"""Makes the files of the job that whole loops are compared on: a random model over few words, and prompts.

Every token is about equally likely, end-of-sequence among them, so responses end after some 500 tokens by
chance: their lengths are as spread as those of a real job, and no weights have to be downloaded.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from services.settings.load import compose_settings
from services.settings.sections import Settings
from tests.benchmarks.gpu_trainer.shapes import SHAPES

CONFIG = Path(__file__).parent / "job.toml"
WORDS = 512
"""Tokens there are; a response has about as many."""
PAD, EOS = 0, 1
PROMPT_WORDS = 64
PROMPTS = 4096
TINY = (
    "bound.groups_per_step=4",
    "sampling.samples_per_prompt=4",
    "sampling.max_tokens=8",
    "engine.name=hf",
    "engine.max_running=16",
    "engine.dtype=float32",
    "trainer.dtype=float32",
    "rollout.groups_in_flight=8",
)
"""Overrides for a rehearsal without a GPU."""


@dataclass(frozen=True, slots=True)
class JobFiles:
    """What a job reads."""

    model: Path
    """A directory as Hugging Face writes it."""
    prompts: Path
    """A file with a prompt on each line."""

    def settings(self, overrides: tuple[str, ...]) -> Settings:
        """Return the job's settings."""
        return compose_settings(str(CONFIG), self.overrides(overrides), {})

    def overrides(self, further: tuple[str, ...]) -> list[str]:
        """Return the job's paths and further overrides, as `--set` takes them."""
        return [f"model.path={self.model}", f"prompts.path={self.prompts}", *further]


def make_files(directory: Path, size: str) -> JobFiles:
    """Write model, tokenizer and prompts, unless they are there.

    Args:
        directory: may hold the files of several sizes.
        size: one of `SHAPES`.
    """
    files = JobFiles(directory / f"words-{size}", directory / "prompts.jsonl")
    if not (files.model / "done").exists():
        _write_model(files.model, size)
        _write_tokenizer(files.model)
        (files.model / "done").touch()
    _write_prompts(files.prompts)
    return files


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a file that `make_files` wrote."""
    return [json.loads(line)["prompt"] for line in path.read_text().splitlines()]


def _write_model(directory: Path, size: str) -> None:
    shape = SHAPES[size]
    config = Qwen2Config(
        vocab_size=WORDS,
        hidden_size=shape["hidden"],
        intermediate_size=shape["intermediate"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        tie_word_embeddings=False,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        initializer_range=0.01,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = EOS, PAD
    model.save_pretrained(directory)


def _write_tokenizer(directory: Path) -> None:
    """Write a tokenizer of words, to be loaded by its own class: AutoTokenizer would read it as Qwen's."""
    words = {"<pad>": PAD, "<eos>": EOS} | {f"w{number}": number for number in range(2, WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<pad>",
        model_max_length=4096,
    ).save_pretrained(directory)


def _write_prompts(path: Path) -> None:
    numbers = random.Random(0)
    prompts = (
        " ".join(f"w{numbers.randrange(2, WORDS)}" for _ in range(PROMPT_WORDS)) for _ in range(PROMPTS)
    )
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": ""}) + "\n" for prompt in prompts))
