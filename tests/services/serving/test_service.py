"""`tether serve` as its clients know it: the `openai` package; transformers computes the same again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import torch
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM, PreTrainedModel

from protocol.errors import SettingsError
from services.serving.service import serve
from services.serving.source import Serving, serving_of
from services.serving.versions import versions_of
from services.settings.load import compose_settings, dump_settings, run_settings
from trainer.config import ScratchConfig, WeightConfig
from trainer.random_model import build_scratch
from trainer.weights.files import FileSender, disk_sender, shm_sender

ENGINE = ["engine.name=hf", "engine.max_model_len=64"]
KEY = "a key of clients, long enough"


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return build_scratch(ScratchConfig(), tmp_path / "small")


@asynccontextmanager
async def serving(served: Serving) -> AsyncIterator[str]:
    """Serve within the block; yields the base URL."""
    stop, urls = asyncio.Event(), asyncio.Queue[str](1)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serve(served, stop, urls.put_nowait))
        try:
            yield await urls.get()
        finally:
            stop.set()


def client_of(url: str, key: str = "any") -> AsyncOpenAI:
    return AsyncOpenAI(base_url=url, api_key=key, max_retries=0)


def logprobs_of(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> list[float]:
    """Compute with transformers the log-probability of each token of an answer."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0]
    rows = torch.log_softmax(logits.float(), -1)[len(prompt) - 1 : -1]
    return [float(row[token]) for row, token in zip(rows, answer, strict=True)]


async def test_a_model_directory_answers_with_its_own_logprobs(model_dir: Path) -> None:
    async with serving(serving_of(str(model_dir), ENGINE, False)) as url, client_of(url) as client:
        (listed,) = (await client.models.list()).data
        assert listed.id == "small"
        prompt = [5, 6, 7]
        body = {"model": "small", "prompt": prompt, "max_tokens": 6, "temperature": 0, "logprobs": 0}
        tokens = await _generated(url, prompt)
        answer = await client.completions.create(**body)
        (choice,) = answer.choices
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        expected = AutoModelForCausalLM.from_pretrained(model_dir)
        assert choice.logprobs.token_logprobs == pytest.approx(
            logprobs_of(expected, prompt, tokens), abs=1e-4
        )
        assert answer.system_fingerprint is None


async def _generated(url: str, prompt: list[int]) -> list[int]:
    """Return the tokens of a greedy answer, by the API that has tokens."""
    body = {"token_ids": prompt, "sampling_params": {"max_tokens": 6, "temperature": 0}}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url.removesuffix("/v1") + "/inference/v1/generate", json=body) as response,
    ):
        found: list[int] = (await response.json())["choices"][0]["token_ids"]
    return found


async def test_requests_have_their_own_sampling_and_no_memory_of_each_other(model_dir: Path) -> None:
    async with serving(serving_of(str(model_dir), ENGINE, False)) as url, client_of(url) as client:
        greedy = [
            await client.completions.create(model="small", prompt="1+2", temperature=0, max_tokens=8)
            for _ in range(2)
        ]
        assert greedy[0].choices[0].text == greedy[1].choices[0].text
        seeded: Any = {
            "model": "small", "prompt": "1+2", "temperature": 1.5, "top_p": 0.9, "seed": 3, "max_tokens": 8
        }  # fmt: skip
        first = await client.completions.create(**seeded)
        twice = [await client.completions.create(**seeded, n=3) for _ in range(2)]
        texts, again = ([choice.text for choice in several.choices] for several in twice)
        assert texts == again
        assert (texts[0], len(set(texts))) == (first.choices[0].text, 3)
        whole = await client.completions.create(model="small", prompt=[5, 6, 7])
        assert whole.usage is not None
        assert whole.usage.total_tokens <= 64


async def test_a_chat_streams_the_answer_of_a_plain_call(model_dir: Path) -> None:
    async with serving(serving_of(str(model_dir), ENGINE, False)) as url, client_of(url) as client:
        plain = await client.chat.completions.create(
            model="small", messages=[{"role": "user", "content": "1+2"}], temperature=0, max_tokens=8
        )
        stream = await client.chat.completions.create(
            model="small",
            messages=[{"role": "user", "content": "1+2"}],
            temperature=0,
            max_tokens=8,
            stream=True,
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == plain.choices[0].message.content


async def test_answers_name_the_model_of_the_list_where_the_request_names_none(model_dir: Path) -> None:
    async with serving(serving_of(str(model_dir), ENGINE, False)) as url, client_of(url) as client:
        text = await client.completions.create(model="", prompt="1+2", max_tokens=1)
        user = {"role": "user", "content": "1+2"}
        asked: Any = {"messages": [user], "max_tokens": 1, "stream": True}
        chunks = [chunk.model async for chunk in await client.chat.completions.create(model="", **asked)]
        assert {text.model, *chunks} == {model.id async for model in client.models.list()} == {"small"}


async def test_requests_beyond_the_server_are_refused_by_name(model_dir: Path) -> None:
    async with serving(serving_of(str(model_dir), ENGINE, False)) as url, client_of(url) as client:
        with pytest.raises(openai.NotFoundError, match="there is no model 'other'; there is small"):
            await client.completions.create(model="other", prompt="1")
        with pytest.raises(openai.BadRequestError, match="context length of 63"):
            await client.completions.create(model="small", prompt=[5] * 64)
        with pytest.raises(openai.BadRequestError, match="logit_bias"):
            await client.completions.create(model="small", prompt="1", logit_bias={"5": 1})
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{url}/models", headers={"Host": "attacker.example"}) as answer,
        ):
            assert answer.status == 403


@pytest.mark.parametrize("length", [257, 1024])
async def test_a_length_above_the_positions_is_refused_if_it_is_set(model_dir: Path, length: int) -> None:
    settings = ["engine.name=hf", f"engine.max_model_len={length}"]
    said = f"max_model_len {length} exceeds the 256 positions of .*; set engine.max_model_len to 256 or less"
    with pytest.raises(SettingsError, match=said):
        await serve(serving_of(str(model_dir), settings, False), asyncio.Event(), print)


@pytest.mark.parametrize("from_file", [False, True])
async def test_the_default_length_ends_at_the_positions(
    model_dir: Path, tmp_path: Path, from_file: bool
) -> None:
    config = tmp_path / "small.toml"
    config.write_text('[model]\npath = "small"\n')
    served = serving_of(str(config if from_file else model_dir), ["engine.name=hf"], False)
    async with serving(served) as url, client_of(url) as client:
        with pytest.raises(openai.BadRequestError, match="context length of 255"):
            await client.completions.create(model="small", prompt=[5] * 256)
        whole = await client.completions.create(model="small", prompt=[5] * 255)
        assert whole.usage is not None
        assert whole.usage.total_tokens == 256


async def test_a_key_is_needed_where_one_is_given(model_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(KEY)
    file.chmod(0o600)
    served = replace(serving_of(str(model_dir), ENGINE, False), key_file=str(file))
    async with serving(served) as url:
        async with client_of(url, "wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.completions.create(model="small", prompt="1")
        async with client_of(url, KEY) as client:
            assert (await client.completions.create(model="small", prompt="1", max_tokens=1)).choices


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["environment.host=0.0.0.0"], "travel in plain text"),
        (["environment.host=0.0.0.0", "environment.plain_http=true"], "give --key-file"),
        (["environment.cert_file=cert.pem"], "environment.key_file, which is empty"),
    ],
)
async def test_an_address_that_is_not_safe_is_refused(model_dir: Path, more: list[str], why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        await serve(serving_of(str(model_dir), [*ENGINE, *more], False), asyncio.Event(), print)


async def test_a_key_file_that_cannot_be_read_is_named_once(model_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.symlink_to(file)
    served = replace(serving_of(str(model_dir), ENGINE, False), key_file=str(file))
    with pytest.raises(SettingsError, match=f"^--key-file {file}: Too many levels of symbolic links$"):
        await serve(served, asyncio.Event(), print)


async def test_random_weights_are_not_served(model_dir: Path) -> None:
    (model_dir / "model.safetensors").unlink()
    with pytest.raises(SettingsError, match="no safetensors"):
        await serve(serving_of(str(model_dir), ENGINE, False), asyncio.Event(), print)


def test_only_a_run_can_be_followed(model_dir: Path) -> None:
    with pytest.raises(SettingsError, match="--follow: no run in"):
        serving_of(str(model_dir), [], True)
    with pytest.raises(SettingsError, match="is not a run, a settings file or a Hugging Face model"):
        serving_of(str(model_dir / "checkpoints"), [], False)


def _run_of(model_dir: Path, run_dir: Path, transport: str) -> Path:
    """Write the settings of a run, as its services find them."""
    run_dir.mkdir()
    values = [f"model.path={model_dir}", f"run.dir={run_dir}", "run.name=followed"]
    dump_settings(
        compose_settings(None, [*values, *ENGINE, f"weights.transport={transport}"]),
        run_dir / "settings.json",
    )
    return run_dir


def _models(tmp_path: Path) -> list[Path]:
    return [build_scratch(ScratchConfig(seed=seed), tmp_path / f"model-{seed}") for seed in (1, 2)]


def _publish(sender: FileSender, epoch: str, version: int, directory: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory)
    names = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    tied = model.config.tie_word_embeddings
    sender.publish(epoch, version, iter((names if tied else model.state_dict()).items()))


@pytest.mark.parametrize("transport", ["disk", "shm"])
async def test_each_published_version_of_a_run_is_served(tmp_path: Path, transport: str) -> None:
    models = _models(tmp_path)
    run_dir = _run_of(models[0], tmp_path / "run", transport)
    config = WeightConfig(keep=1)
    sender = (
        disk_sender(config, run_dir)
        if transport == "disk"
        else shm_sender(config, "followed", run_dir=run_dir)
    )
    try:
        async with serving(serving_of(str(run_dir), [], True)) as url, client_of(url) as client:
            with pytest.raises(
                openai.InternalServerError, match="none yet, or it is over; its newest export"
            ):
                await client.completions.create(model="followed", prompt="1")
            for version, (epoch, directory) in enumerate(zip(("a", "b"), models, strict=True)):
                _publish(sender, epoch, version, directory)
                await _serves(url, version)
                tokens = await _generated(url, [5, 6, 7])
                answer = await client.completions.create(
                    model="followed", prompt=[5, 6, 7], temperature=0, max_tokens=6, logprobs=0
                )
                assert answer.system_fingerprint == f"v{version}"
                found = answer.choices[0].logprobs
                assert found is not None
                expected = AutoModelForCausalLM.from_pretrained(directory)
                assert found.token_logprobs == pytest.approx(
                    logprobs_of(expected, [5, 6, 7], tokens), abs=1e-4
                )
    finally:
        sender.close()


def test_versions_of_another_run_of_the_same_name_are_not_served(tmp_path: Path) -> None:
    models = _models(tmp_path)
    config = WeightConfig(keep=1)
    run_dirs = [_run_of(models[0], tmp_path / name, "shm") for name in ("run", "copy")]
    with ExitStack() as stack:
        for version, run_dir in enumerate(run_dirs):
            sender = stack.enter_context(closing(shm_sender(config, "followed", run_dir=run_dir)))
            _publish(sender, "e", version, models[version])
        found = [versions_of(run_settings(run_dir)).newest() for run_dir in run_dirs]
        assert [manifest and manifest.version for manifest in found] == [0, 1]


async def test_exports_are_followed_where_versions_are_no_files(tmp_path: Path) -> None:
    models = _models(tmp_path)
    run_dir = _run_of(models[0], tmp_path / "run", "nccl")
    (run_dir / "exports").mkdir()
    models[1].rename(run_dir / "exports/step_00000020")
    async with serving(serving_of(str(run_dir), [], True)) as url:
        await _serves(url, 20)
    stands = serving_of(str(run_dir), [], False)
    assert stands.settings.model_dir == run_dir / "exports/step_00000020"


async def _serves(url: str, version: int) -> None:
    """Return once a version is served."""
    async with asyncio.timeout(60), aiohttp.ClientSession() as session:
        while True:
            async with session.get(url.removesuffix("/v1") + "/health") as answer:
                if (await answer.json())["version"] == version:
                    return
            await asyncio.sleep(0.05)
