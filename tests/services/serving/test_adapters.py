"""Adapters that `tether serve` serves by name; transformers computes with them merged, one at a time."""

import asyncio
import json
from pathlib import Path

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from protocol.errors import SettingsError
from protocol.weights.lora import LoraConfig, adapter_shapes, adapter_targets
from services.serving.source import Serving, serving_of, with_adapters
from tests.changes import SGLANG, VLLM, slow_unless_changed
from tests.contracts.sglang_environment import sglang_settings
from tests.services.serving.test_service import ENGINE, client_of, logprobs_of, serving
from trainer.config import ScratchConfig
from trainer.lora import save_adapter
from trainer.random_model import build_scratch

CONFIGS = {
    "first": LoraConfig(rank=4, alpha=32.0),
    "second": LoraConfig(rank=3, alpha=9.0, target_modules=("q_proj", "down_proj"), use_rslora=True),
}


def write_adapter(model_dir: Path, directory: Path, config: LoraConfig, seed: int) -> PreTrainedModel:
    """Write a random adapter; returns the model with it merged, by its formula."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_dir)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    targets = adapter_targets(shapes, config)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.2
        for name, shape in adapter_shapes(targets, config.rank).items()
    }
    save_adapter(tensors.items(), directory, config, model_dir)
    written = json.loads((directory / "adapter_config.json").read_text())
    root = written["r"] ** 0.5 if written["use_rslora"] else written["r"]
    for target in targets:
        change = written["lora_alpha"] / root * tensors[target.b] @ tensors[target.a]
        model.get_parameter(target.weight).data += change
    return model


@pytest.fixture
def served(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Serving, dict[str, PreTrainedModel]]:
    model_dir = build_scratch(ScratchConfig(), tmp_path / "small")
    name = getattr(request, "param", "hf")
    engine = [f"engine.name={name}", "engine.dtype=float32", ENGINE[1]]
    if name == "sglang":
        own = sglang_settings()
        variables = ", ".join(f"{key}='{value}'" for key, value in own.pop("environment", {}).items())
        engine += [f"engine.{key}={value}" for key, value in own.items()]
        engine += [f"engine.environment={{{variables}}}"]
    models: dict[str, PreTrainedModel] = {"small": AutoModelForCausalLM.from_pretrained(model_dir)}
    for seed, (name, config) in enumerate(CONFIGS.items()):
        models[name] = write_adapter(model_dir, tmp_path / name, config, seed)
    options = [f"{name}={tmp_path / name}" for name in CONFIGS]
    return with_adapters(serving_of(str(model_dir), engine, False), options), models


@pytest.mark.parametrize(
    "served",
    [
        "hf",
        "megatron",
        pytest.param("sglang", marks=[pytest.mark.engine, slow_unless_changed(*SGLANG)]),
        pytest.param("vllm", marks=[pytest.mark.engine, slow_unless_changed(*VLLM)]),
    ],
    indirect=True,
)
async def test_requests_at_once_have_each_the_adapter_that_their_model_names(
    served: tuple[Serving, dict[str, PreTrainedModel]],
) -> None:
    found, models = served
    async with serving(found) as url, client_of(url) as client:
        assert [model.id for model in (await client.models.list()).data] == list(models)
        prompts = [[5, 6, 7], [8, 9], [3, 1, 4, 1, 5]]
        asked = [(name, prompt) for prompt in prompts for name in models]
        async with asyncio.TaskGroup() as group:
            calls = [
                group.create_task(
                    client.completions.create(
                        model=name,
                        prompt=prompt,
                        max_tokens=12,
                        temperature=0,
                        logprobs=0,
                    ),
                    name=f"{name} {prompt}",
                )
                for name, prompt in asked
            ]
        for (name, prompt), call in zip(asked, calls, strict=True):
            answer = call.result()
            assert answer.model == name
            logprobs = answer.choices[0].logprobs
            assert logprobs is not None
            assert logprobs.token_logprobs is not None
            tokens = greedy(models[name], prompt, len(logprobs.token_logprobs))
            assert logprobs.token_logprobs == pytest.approx(
                logprobs_of(models[name], prompt, tokens), abs=1e-4
            )
        with pytest.raises(openai.NotFoundError, match="no model 'third'; there are small, first, second"):
            await client.completions.create(model="third", prompt="1")


def greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """Return the next tokens, each computed from the whole sequence."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["first"], "give NAME=DIR"),
        (["=x"], "give NAME=DIR"),
        (["small=x"], "there is a model 'small' already"),
        (["a=x", "a=y"], "there is a model 'a' already"),
    ],
)
def test_option_that_names_no_adapter_is_refused(options: list[str], words: str, tmp_path: Path) -> None:
    model_dir = build_scratch(ScratchConfig(), tmp_path / "small")
    with pytest.raises(SettingsError, match=words):
        with_adapters(serving_of(str(model_dir), ENGINE, False), options)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"r": 5}, "adapter 'first': .*lora_A.weight has the shape"),
        ({"lora_alpha": 0}, "lora_alpha 0; both must be above 0"),
        ({"bias": "all"}, "bias is 'all'; only 'none' is supported"),
    ],
)
async def test_adapter_that_cannot_be_computed_is_refused_by_name(
    served: tuple[Serving, dict[str, PreTrainedModel]], changed: dict[str, object], words: str
) -> None:
    found, _ = served
    file = Path(found.adapters["first"]) / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    with pytest.raises(ExceptionGroup) as caught:
        async with serving(found):
            pass
    assert caught.group_contains(SettingsError, match=words)


async def test_engine_without_adapters_by_name_is_refused(
    served: tuple[Serving, dict[str, PreTrainedModel]],
) -> None:
    found, _ = served
    settings = serving_of(found.settings.model.path, ["engine.name=scripted"], False)
    other = with_adapters(settings, [f"{name}={path}" for name, path in found.adapters.items()])
    with pytest.raises(ExceptionGroup) as caught:
        async with serving(other):
            pass
    assert caught.group_contains(
        SettingsError, match="'scripted' does not serve adapters by name; use one of hf"
    )
