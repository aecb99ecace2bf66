"""Tests SGLang's completions and HTTP session, and (slow) a real server: sleep, adapters, aborts, its end."""

import asyncio
import base64
import os
import signal
from contextlib import suppress
from pathlib import Path

import aiohttp
import numpy as np
import psutil
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from transformers import Qwen2Config, Qwen2ForCausalLM

from protocol.errors import EngineError, EngineSettingsError
from protocol.messages import WeightManifest
from protocol.weights.lora import LoraConfig
from rollout.engines.base import Engine, EngineConfig, Request, Sampling
from rollout.engines.contract.models import tiny_model, weights, write_shm
from rollout.engines.multi_process.routed_experts import Mixture
from rollout.engines.registry import make_engine
from rollout.engines.sglang.engine import SglangEngine, completion_of, new_session
from rollout.engines.sglang.sampling import VERSIONS
from tests.contracts.sglang_environment import STAND_INS, sglang_settings

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


async def test_an_engine_whose_server_does_not_answer_counts_as_dead(tmp_path: Path) -> None:
    async def hang_up(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    app = web.Application()
    app.router.add_post("/generate", hang_up)
    engine = SglangEngine(EngineConfig(name="sglang"), tmp_path, "rollout.0.a")
    async with TestServer(app) as server, new_session("key") as session:
        engine._http, engine._server.url = session, str(server.make_url("")).rstrip("/")
        await engine.check()
        with pytest.raises(EngineError, match="does not answer"):
            await engine._complete(REQUEST, "0:r/0")
        with pytest.raises(EngineError, match="SGLang's server, or one of its ranks, ended"):
            await engine.check()


def test_completion_has_a_version_for_every_token() -> None:
    found = completion_of(REQUEST, answer([5, 6, 6]))
    assert (found.tokens, found.logprobs, found.finish_reason) == ((7, 8, 9), (-0.5, -0.5, -0.5), "length")
    assert found.spans == ((1, 5), (3, 6))


def test_completion_has_the_experts_of_every_input() -> None:
    rows = np.arange(4 * 3 * 2, dtype=np.int32).reshape(4, 3, 2)
    found = answer([5, 5, 5])
    found["meta_info"]["routed_experts"] = base64.b64encode(rows.tobytes()).decode()  # type: ignore[index]
    experts = completion_of(REQUEST, found, Mixture((0, 2), 3, 2)).experts
    np.testing.assert_array_equal(experts, rows[:, [0, 2]])
    with pytest.raises(EngineError, match="request r/0: the engine reported experts of shape None for 4"):
        completion_of(REQUEST, answer([5, 5, 5]), Mixture((0, 2), 3, 2))


@pytest.mark.parametrize(
    "wrong", [answer([]), answer([4, 4]), answer([4, None, 4]), answer([4, 4, 4], logprobs=2)]
)
def test_incomplete_answer_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(EngineError, match="r/0"):
        completion_of(REQUEST, wrong)


def test_only_token_that_can_be_sampled_has_probability_one() -> None:
    request = Request("r/0", (1,), Sampling(max_tokens=3, temperature=0.5, top_k=1))
    assert completion_of(request, answer([4, 4, 4])).logprobs == (0.0, 0.0, 0.0)


async def test_session_reuses_no_connection_that_the_server_may_close() -> None:
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


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_server_keeps_aborted_tokens_answers_its_owner_alone_and_ends_with_its_scheduler(
    tmp_path: Path,
) -> None:
    model = tiny_model(1)
    model.config.max_position_embeddings = 8192
    model.save_pretrained(tmp_path / "model")
    config = EngineConfig(name="sglang", max_model_len=8000, kv_cache_mb=64, **sglang_settings())
    engine = make_engine(config, tmp_path / "model", "sglang.test")
    before = set(psutil.Process().children(recursive=True))  # other tests' engines leave a resource tracker
    await engine.start()
    processes = [process for process in psutil.Process().children(recursive=True) if process not in before]
    try:
        await aborted_during_prefill(engine, write_shm(tmp_path / "v0", weights(model), 0))
        port = next(word.partition("=")[2] for word in processes[0].cmdline() if word.startswith("--port="))
        async with (
            aiohttp.ClientSession() as stranger,
            stranger.post(f"http://127.0.0.1:{port}/generate", json={"input_ids": [1]}) as refused,
        ):
            assert refused.status == 401
        assert engine._http is not None
        async with engine._http.get(f"http://127.0.0.1:{port}/get_server_info") as response:
            assert (await response.json())["disable_overlap_schedule"] is False
        scheduler = next(process for process in processes if "scheduler" in " ".join(process.cmdline()))
        scheduler.send_signal(signal.SIGKILL)
        with pytest.raises(EngineError):
            await engine.generate(Request("cut/0", (1, 2, 3), Sampling(max_tokens=900)))
        with pytest.raises(EngineError, match=r"ended|answer"):
            await engine.generate(Request("next/0", (1, 2, 3), Sampling(max_tokens=4)))
    finally:
        await engine.close()
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive


async def aborted_during_prefill(engine: Engine, manifest: WeightManifest) -> None:
    """Abort a request whose prompt is computed in two parts, after a version was committed."""
    prompt = tuple(i % 500 for i in range(6000))  # SGLang computes 4096 tokens at once
    async with asyncio.TaskGroup() as group:
        request = Request("long/0", prompt, Sampling(max_tokens=1900, temperature=0))
        cut = group.create_task(engine.generate(request), name="cut")
        pilot = Request("pilot/0", prompt[::-1], Sampling(max_tokens=60, temperature=0))
        await engine.generate(pilot)
        await engine.stage(manifest)
        await engine.commit(manifest)
        await engine.abort(["long/0"])
    found = cut.result()
    assert found.finish_reason == "abort"
    assert len(found.tokens) == len(found.logprobs) == found.spans[-1][0] > 0


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_sleeping_server_holds_neither_weights_nor_their_copy(tmp_path: Path) -> None:
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
async def test_an_interpreter_that_replaces_the_path_of_modules_is_refused_as_a_setting(
    tmp_path: Path,
) -> None:
    tiny_model(1).save_pretrained(tmp_path / "model")
    settings = sglang_settings()
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nexec env PYTHONPATH={STAND_INS} {settings["python"]} "$@"\n')
    interpreter.chmod(0o755)
    config = EngineConfig(name="sglang", **settings | {"python": str(interpreter)})
    engine = make_engine(config, tmp_path / "model", "sglang.test")
    with pytest.raises(EngineSettingsError, match=r"did not load tether's plug-in.*engine\.python must keep"):
        await engine.start()


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_adapter_without_a_place_is_refused_by_name_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    tiny_model(1).save_pretrained(tmp_path / "model")
    before = abandoned()
    lora = LoraConfig(rank=4, target_modules=("lm_head", "q_proj"))
    engine = make_engine(
        EngineConfig(name="sglang", **sglang_settings()), tmp_path / "model", "sglang.test", lora
    )
    with pytest.raises(
        EngineError,
        match=r"no parameter for tensor base_model.*lora_A\.weight: remove its layer",
    ):
        await engine.start()
    assert not abandoned() - before
