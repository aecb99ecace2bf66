"""The job's files and settings, without a GPU."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from services.settings.checks import settings_errors
from services.tools.check import check_configuration
from tests.benchmarks.gpu_loop.job import (
    CONFIG,
    EOS,
    PROMPT_WORDS,
    TINY,
    WORDS,
    JobFiles,
    make_files,
    read_prompts,
)
from tests.benchmarks.gpu_loop.run import OURS
from tests.benchmarks.gpu_loop.word_reward import score


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> JobFiles:
    return make_files(tmp_path_factory.mktemp("job"), "tiny")


def test_model_ends_a_response_after_about_as_many_tokens_as_there_are_words(files: JobFiles) -> None:
    model = AutoModelForCausalLM.from_pretrained(files.model, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(files.model)
    prompt = read_prompts(files.prompts)[0]
    tokens = tokenizer(prompt, return_tensors="pt").input_ids
    assert tokens.shape == (1, PROMPT_WORDS)
    assert tokenizer.decode(tokens[0]) == prompt
    with torch.no_grad():
        end = model(tokens).logits[0].softmax(-1)[:, EOS]
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == EOS
    assert torch.all((end > 0.5 / WORDS) & (end < 2 / WORDS))


def test_files_that_are_there_are_kept(files: JobFiles) -> None:
    before = {path: path.stat().st_mtime_ns for path in files.model.iterdir()}
    assert make_files(files.model.parent, "tiny") == files
    assert {path: path.stat().st_mtime_ns for path in files.model.iterdir()} == before


def test_prompts_differ_and_score_something(files: JobFiles) -> None:
    prompts = read_prompts(files.prompts)
    assert len(set(prompts)) == len(prompts)
    assert json.loads(files.prompts.read_text().splitlines()[0]).keys() == {"prompt", "answer"}
    assert [score(response=" ".join("w" * count)) for count in (0, 6, 7, 8)] == [0, 6 / 7, 0, 1 / 7]


@pytest.mark.parametrize("way", OURS)
def test_settings_of_each_way_are_accepted(files: JobFiles, way: str) -> None:
    settings = files.settings(OURS[way])
    assert not list(settings_errors(settings))
    assert settings.bound.groups_per_step * settings.sampling.samples_per_prompt == 256
    assert settings.sampling.max_tokens + PROMPT_WORDS <= settings.engine.max_model_len


def test_rehearsal_passes_the_check_before_a_start(files: JobFiles, tmp_path: Path) -> None:
    found = check_configuration(str(CONFIG), files.overrides((*TINY, f"run.dir={tmp_path / 'run'}")))
    assert not found.problems
    assert found.summary
