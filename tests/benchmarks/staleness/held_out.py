"""Scores the versions that a run kept on its held-out prompts, exactly.

The score of a version is the mean over the prompts of the probability that it samples the whole right answer:
the expectation of the reward `exact_match`, without the noise of sampling.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from rollout.prompts.held_out import held_out_sets
from rollout.prompts.registry import make_source
from rollout.render import Renderer
from services.settings.load import run_settings


def score_versions(run_dir: Path) -> dict[int, float]:
    """Return version -> score, for version 0 and all exports."""
    transformers_logging.disable_progress_bar()
    settings = run_settings(run_dir)
    source = make_source(settings.prompts)
    (prompts,) = held_out_sets(source, settings.prompts, (), settings.prompts.held_out).values()
    renderer = Renderer(settings.model_dir, settings.rendering)
    tokenizer = AutoTokenizer.from_pretrained(settings.model_dir, local_files_only=True)
    rows = [
        (
            list(renderer.prompt_tokens(prompt)),
            tokenizer.encode(str(prompt.metadata["answer"]), add_special_tokens=False),
        )
        for prompt in prompts
    ]
    versions = {0: settings.model_dir}
    for directory in (run_dir / "exports").glob("step_*"):
        versions[int(directory.name.removeprefix("step_"))] = directory
    temperature = settings.sampling.temperature
    return {version: _score(directory, rows, temperature) for version, directory in sorted(versions.items())}


@torch.no_grad()
def _score(directory: Path, rows: list[tuple[list[int], list[int]]], temperature: float) -> float:
    """Return the mean probability of the answers; prompts have one length, and answers too."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()
    tokens = torch.tensor([prompt + answer for prompt, answer in rows])
    first = len(rows[0][0])
    logits = model(input_ids=tokens, use_cache=False).logits[:, first - 1 : -1] / temperature
    chosen = logits.log_softmax(-1).gather(-1, tokens[:, first:, None])[..., 0]
    return float(chosen.sum(-1).exp().mean())
