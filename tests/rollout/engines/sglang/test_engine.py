import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import aiohttp
import psutil
import pytest
import safetensors.torch
import torch
import uvloop
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen2Config, Qwen2ForCausalLM

from protocol.errors import EngineError
from protocol.weights.lora import LoraConfig
from rollout.engines.base import EngineConfig, Request, Sampling
from rollout.engines.registry import make_engine
from rollout.engines.sampling import kept_tokens, sampled_distribution
from rollout.engines.sglang.engine import completion_of, new_session
from rollout.engines.sglang.launch import (
    HIGHEST_PORT,
    adapter_options,
    free_port,
    kv_tokens,
    server_command,
    server_environment,
)
from rollout.engines.sglang.lora import Numbered, first_adapter
from rollout.engines.sglang.memory import SAVER, check_memory_saver
from rollout.engines.sglang.sampling import VERSIONS
from tests.contracts.engine_models import tiny_model, weights, write_shm
from tests.contracts.sglang_environment import sglang_settings

REQUEST = Request("r/0", (1, 2), Sampling(max_tokens=3))


def answer(versions: list[int | None], logprobs: int = 3) -> dict[str, object]:
    return {
        "output_ids": [7, 8, 9],
        "meta_info": {
            "finish_reason": {"type": "length", "length": 3},
            "output_token_logprobs": [[-0.5, 7, None]] * logprobs,
            VERSIONS: versions,
        },
    }


def abandoned() -> set[str]:
    """SGLang's shared memory that no process has mapped."""
    maps = []
    for pid in psutil.pids():
        with suppress(OSError):
            maps.append(Path(f"/proc/{pid}/maps").read_text())
    return {
        name
        for name in os.listdir("/dev/shm")
        if name.startswith("sglang") and not any(name in text for text in maps)
    }


def test_a_completion_has_a_version_for_every_token() -> None:
    found = completion_of(REQUEST, answer([5, 6, 6]))
    assert (found.tokens, found.logprobs, found.finish_reason) == ((7, 8, 9), (-0.5, -0.5, -0.5), "length")
    assert found.spans == ((1, 5), (3, 6))


@pytest.mark.parametrize(
    "wrong", [answer([]), answer([4, 4]), answer([4, None, 4]), answer([4, 4, 4], logprobs=2)]
)
def test_an_answer_that_leaves_something_out_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(EngineError, match="r/0"):
        completion_of(REQUEST, wrong)


def test_the_only_token_that_can_be_sampled_has_probability_one() -> None:
    request = Request("r/0", (1,), Sampling(max_tokens=3, temperature=0.5, top_k=1))
    assert completion_of(request, answer([4, 4, 4])).logprobs == (0.0, 0.0, 0.0)


@given(
    st.lists(st.tuples(st.integers(0, 12), st.floats(0.01, 1.0)), min_size=1, max_size=5),
    st.integers(0, 2**31),
)
def test_tokens_kept_in_a_batch_are_those_of_each_row(limits: list[tuple[int, float]], seed: int) -> None:
    scores = torch.randn(len(limits), 9, generator=torch.Generator().manual_seed(seed)).round(
        decimals=1
    )  # with equals
    kept = kept_tokens(scores, torch.tensor([k for k, _ in limits]), torch.tensor([p for _, p in limits]))
    for row, (k, p), found in zip(scores, limits, kept, strict=True):
        assert found.any()
        assert torch.equal(sampled_distribution(row, Sampling(1, top_k=k, top_p=p)) > -torch.inf, found)


def test_the_command_names_what_was_set(tmp_path: Path) -> None:
    tiny_model(1).save_pretrained(tmp_path)
    config = EngineConfig(
        name="sglang",
        python="/x/python",
        dtype="bfloat16",
        max_model_len=256,
        max_running=3,
        tensor_parallel_size=2,
    )
    command = server_command(config, tmp_path, "rollout.0.a", 4000)
    assert command[:3] == ["/x/python", "-m", "sglang.launch_server"]
    assert {
        "--dtype=bfloat16",
        "--tp-size=2",
        "--max-running-requests=3",
        "--load-format=auto",
        "--port=4000",
    } <= set(command)
    assert command != server_command(config, tmp_path, "rollout.1.a", 4000)  # another seed


def test_the_server_gets_no_setting_of_ours_and_what_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TETHER_REDIS_URL", "redis://secret")
    monkeypatch.setenv("PYTHONPATH", "/inherited")
    config = EngineConfig(name="sglang", environment={"PYTHONPATH": "/given", "OMP_NUM_THREADS": "3"})
    environment = server_environment(config, tmp_path)
    assert "redis://secret" not in environment.values()
    assert environment["PYTHONPATH"].split(os.pathsep) == [
        str(tmp_path),
        str(Path(__file__).parents[4]),
        "/given",
        "/inherited",
    ]
    assert environment["OMP_NUM_THREADS"] == "3"


def test_the_port_is_one_that_every_version_takes() -> None:
    assert max(free_port() for _ in range(100)) <= HIGHEST_PORT


def test_a_cache_that_cannot_hold_one_request_is_refused() -> None:
    model = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128, "num_hidden_layers": 2}
    assert kv_tokens(EngineConfig(kv_cache_mb=4), model) == 4096
    with pytest.raises(EngineError, match="kv_cache_mb 1 holds 1024 tokens"):
        kv_tokens(EngineConfig(kv_cache_mb=1, max_model_len=1024), model)


async def test_a_request_does_not_go_where_the_server_may_be_about_to_hang_up() -> None:
    known: set[object] = set()

    async def answer_once(request: web.Request) -> web.Response:
        if request.transport in known:
            request.transport.abort()
        known.add(request.transport)
        return web.Response(text="ok")

    application = web.Application()
    application.router.add_post("/generate", answer_once)
    async with TestServer(application) as server, new_session("key") as session:
        for _ in range(3):
            async with session.post(server.make_url("/generate"), json={}) as response:
                assert await response.text() == "ok"


@given(st.data())
def test_numbers_that_went_through_a_loader_show_what_it_copies(data: st.DataObject) -> None:
    columns = data.draw(st.integers(1, 5))
    shapes = {f"t{i}": (data.draw(st.integers(1, 6)), columns) for i in range(data.draw(st.integers(1, 4)))}
    left = data.draw(st.integers(0, columns - 1))
    right = data.draw(st.integers(left + 1, columns))
    pieces = []
    for name in data.draw(st.lists(st.sampled_from([*shapes, ""]), min_size=1, max_size=6)):
        begin, end = sorted(data.draw(st.tuples(st.integers(0, 6), st.integers(0, 6))))
        pieces.append((name, begin, end + 1))

    def load(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        nothing = torch.zeros(7, columns, dtype=next(iter(tensors.values())).dtype)
        return torch.cat([tensors.get(name, nothing)[begin:end, left:right] for name, begin, end in pieces])

    numbered = Numbered.of(shapes)
    values = {name: torch.randn(shape) for name, shape in shapes.items()}
    expected = load(values)
    if not expected.numel():
        return
    copies, fills = numbered.found_in("p", load(numbered.tensors))
    found = torch.full_like(expected, torch.nan)
    for copy in copies:
        copy.target.on(found).copy_(copy.source.on(values[copy.name]))
    for fill in fills:
        fill.on(found).zero_()
    assert torch.equal(found, expected)


def test_a_tensor_that_a_loader_turns_is_refused() -> None:
    numbered = Numbered.of({"t": (2, 3), "u": (2, 1)})
    for rearranged in (numbered.tensors["t"].T.contiguous(), torch.cat([*numbered.tensors.values()], 1)):
        with pytest.raises(EngineError, match=r"rearranges the rows of adapter tensor o_proj\.0\.a"):
            numbered.found_in("o_proj.0.a", rearranged)


def test_the_first_adapter_changes_nothing_and_has_all_of_a_fused_layer(tmp_path: Path) -> None:
    model = tiny_model(1)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    first_adapter(
        tmp_path / "adapter",
        shapes,
        LoraConfig(rank=4, target_modules=("v_proj", "up_proj", "o_proj")),
        "bfloat16",
    )
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["v_proj", "up_proj", "o_proj", "q_proj", "k_proj", "gate_proj"]
    assert config["lora_alpha"] == config["r"] == 4
    tensors = safetensors.torch.load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(tensors) == 2 * 6 * 2
    assert not any(tensor.any() for tensor in tensors.values())
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert "--max-loras-per-batch=1" in adapter_options(tmp_path)


@pytest.mark.skipif(find_spec(SAVER) is not None, reason="here it is there")
async def test_sleep_on_a_gpu_without_the_memory_saver_is_refused_by_its_name() -> None:
    with pytest.raises(EngineError, match=rf"enable_sleep_mode is true, but {sys.executable} has no {SAVER}"):
        await check_memory_saver(sys.executable)


@pytest.mark.parametrize(
    ("python", "words"),
    [("", "No module named 'sglang'"), ("/nowhere/python", r"engine\.python: /nowhere/python")],
)
def test_an_interpreter_without_sglang_is_an_error_that_says_so(
    tmp_path: Path, python: str, words: str
) -> None:
    tiny_model(1).save_pretrained(tmp_path)
    engine = make_engine(EngineConfig(name="sglang", python=python), tmp_path, "sglang.test")
    with pytest.raises(EngineError, match=words):
        uvloop.run(engine.start())  # the event loop of the services


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_server_answers_its_owner_alone_and_a_killed_scheduler_ends_all_of_it(tmp_path: Path) -> None:
    tiny_model(1).save_pretrained(tmp_path / "model")
    engine = make_engine(EngineConfig(name="sglang", **sglang_settings()), tmp_path / "model", "sglang.test")
    before = set(psutil.Process().children(recursive=True))  # other tests' engines leave a resource tracker
    await engine.start()
    processes = [process for process in psutil.Process().children(recursive=True) if process not in before]
    port = next(word.partition("=")[2] for word in processes[0].cmdline() if word.startswith("--port="))
    async with (
        aiohttp.ClientSession() as stranger,
        stranger.post(f"http://127.0.0.1:{port}/generate", json={"input_ids": [1]}) as refused,
    ):
        assert refused.status == 401
    scheduler = next(process for process in processes if "scheduler" in " ".join(process.cmdline()))
    scheduler.send_signal(signal.SIGKILL)
    with pytest.raises(EngineError):
        await engine.generate(Request("cut/0", (1, 2, 3), Sampling(max_tokens=900)))
    with pytest.raises(EngineError, match=r"ended|answer"):
        await engine.generate(Request("next/0", (1, 2, 3), Sampling(max_tokens=4)))
    await engine.close()
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_sleeping_server_holds_neither_weights_nor_their_copy(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = Qwen2Config(
        vocab_size=1 << 16, hidden_size=256, intermediate_size=64, num_hidden_layers=1, **heads
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(tmp_path / "model")
    held = 2 * sum(parameter.nbytes for parameter in model.parameters())
    engine = make_engine(
        EngineConfig(name="sglang", enable_sleep_mode=True, **sglang_settings()),
        tmp_path / "model",
        "sglang.test",
    )
    await engine.start()
    try:
        rank = next(
            child
            for child in psutil.Process().children(recursive=True)
            if "scheduler" in " ".join(child.cmdline())
        )
        for version in range(2):
            manifest = write_shm(tmp_path / f"v{version}", weights(model), version)
            await engine.stage(manifest)
            await engine.commit(manifest)
            awake = rank.memory_info().rss
            await engine.sleep()
            assert awake - rank.memory_info().rss > 0.9 * held
            await engine.wake()
    finally:
        await engine.close()


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_an_adapter_that_sglang_has_no_place_for_is_refused_by_its_name_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    tiny_model(1).save_pretrained(tmp_path / "model")
    before = abandoned()
    lora = LoraConfig(rank=4, target_modules=("lm_head", "q_proj"))
    engine = make_engine(
        EngineConfig(name="sglang", **sglang_settings()), tmp_path / "model", "sglang.test", lora
    )
    with pytest.raises(
        EngineError, match=r"no place for base_model\.model\.lm_head\.lora_A\.weight: leave its layer out"
    ):
        await engine.start()
    assert not abandoned() - before


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_request_that_is_aborted_while_it_is_computed_again_in_pieces_keeps_its_tokens(
    tmp_path: Path,
) -> None:
    model = tiny_model(1)
    model.config.max_position_embeddings = 8192
    model.save_pretrained(tmp_path / "model")
    prompt = tuple(i % 500 for i in range(6000))  # SGLang computes 4096 tokens at once
    config = EngineConfig(name="sglang", max_model_len=8000, kv_cache_mb=64, **sglang_settings())
    engine = make_engine(config, tmp_path / "model", "sglang.test")
    await engine.start()
    try:
        async with asyncio.TaskGroup() as group:
            request = Request("long/0", prompt, Sampling(max_tokens=1900, temperature=0))
            cut = group.create_task(engine.generate(request), name="cut")
            pilot = Request("pilot/0", prompt[::-1], Sampling(max_tokens=60, temperature=0))
            await engine.generate(pilot)
            manifest = write_shm(tmp_path / "v0", weights(model), 0)
            await engine.stage(manifest)
            await engine.commit(manifest)
            await engine.abort(["long/0"])
        found = cut.result()
        assert found.finish_reason == "abort"
        assert len(found.tokens) == len(found.logprobs) == found.spans[-1][0] > 0
    finally:
        await engine.close()
