"""Tests that the experts an engine reports become those of a completion, and what is refused."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from protocol.errors import EngineError
from protocol.messages import UNKNOWN_EXPERT
from rollout.engines.base import Completion, Engine, EngineConfig, Request, Sampling
from rollout.engines.contract.models import weights, write_shm
from rollout.engines.multi_process.routed_experts import Mixture, recorded_experts
from rollout.engines.registry import make_engine
from tests.contracts.engine_models import tiny_experts
from tests.contracts.sglang_environment import sglang_settings

NAMES = [
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.1.mlp.shared_experts.down_proj.weight",
    "model.layers.2.mlp.experts.0.down_proj.weight",
    "model.layers.2.mlp.experts.1.down_proj.weight",
    "model.layers.3.block_sparse_moe.experts.0.w1.weight",
    "model.layers.10.mlp.experts.gate_up_proj",
    "model.layers.11.mlp.experts.0.down_proj.weight",
]
ROWS = np.stack([np.arange(24).reshape(4, 6) + 100 * token for token in range(5)]).reshape(5, 12, 2)
"""As an engine reports them: of five inputs, twelve layers, two experts each."""


MIXTURE = Mixture((2, 10), 12, 2)


def test_layers_with_experts_are_those_of_the_checkpoints_names() -> None:
    model = {"num_hidden_layers": 11, "num_experts_per_tok": 2}
    assert Mixture.of(NAMES, model, Path("m")) == Mixture((2, 3, 10), 11, 2)
    for names, given in ((NAMES[:2], model), (NAMES, {"num_hidden_layers": 11})):
        with pytest.raises(EngineError, match=r"enable_return_routed_experts: the model in m has no experts"):
            Mixture.of(names, given, Path("m"))


def test_rows_are_read_from_their_bytes() -> None:
    data = ROWS.astype(np.int32).tobytes()
    np.testing.assert_array_equal(MIXTURE.rows(data), ROWS)
    assert [MIXTURE.rows(wrong) for wrong in (b"", data[:-1], data[:-4])] == [None] * 3


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32])
def test_experts_are_those_of_the_layers_that_have_some(dtype: type) -> None:
    rows = (ROWS % 100).astype(dtype)
    found = recorded_experts("r", rows, MIXTURE, 5)
    assert found.dtype == np.uint16
    np.testing.assert_array_equal(found, rows[:, [2, 10]])


def test_a_row_that_no_pass_has_written_is_unknown() -> None:
    rows = ROWS.copy()
    rows[1, 2], rows[2, 10] = 0, -1
    found = recorded_experts("r", rows, MIXTURE, 5)
    assert (found[1, 0] == UNKNOWN_EXPERT).all()
    assert (found[2, 1] == UNKNOWN_EXPERT).all()
    assert (found != UNKNOWN_EXPERT).sum() == found.size - 4
    alone = recorded_experts("r", rows[:, :, :1], MIXTURE, 5)
    assert alone[1, 0, 0] == 0


@pytest.mark.parametrize(
    ("rows", "words"), [(None, "None"), (ROWS, r"\[5, 12, 2\] for 6"), (ROWS[0], r"\[12, 2\]")]
)
def test_another_number_of_rows_is_refused(rows: np.ndarray | None, words: str) -> None:
    with pytest.raises(EngineError, match=rf"request r: .*{words}"):
        recorded_experts("r", rows, MIXTURE, 6)
    with pytest.raises(EngineError, match="layers up to 12"):
        recorded_experts("r", ROWS, Mixture((2, 12), 13, 2), 5)


def test_experts_missing_from_an_aborted_request_are_unknown() -> None:
    found = recorded_experts("r", ROWS, MIXTURE, 7, aborted=True)
    np.testing.assert_array_equal(found[:5], ROWS[:, [2, 10]])
    assert (found[5:] == UNKNOWN_EXPERT).all()
    nothing = recorded_experts("r", None, MIXTURE, 2, aborted=True)
    assert nothing.shape == (2, 2, 2)
    assert (nothing == UNKNOWN_EXPERT).all()
    np.testing.assert_array_equal(recorded_experts("r", ROWS, MIXTURE, 3, aborted=True), ROWS[:3, [2, 10]])


PROMPTS = ((5, 17, 200, 33, 9, 411), (7, 17, 200), tuple(range(20, 60)))


@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "dtype", "eager"),
    [
        pytest.param("sglang", "float32", True, marks=pytest.mark.slow, id="sglang-cpu"),
        pytest.param("sglang", "bfloat16", True, marks=pytest.mark.gpu, id="sglang"),
        pytest.param("sglang", "bfloat16", False, marks=pytest.mark.gpu, id="sglang-graphs"),
        pytest.param("vllm", "bfloat16", True, marks=pytest.mark.gpu, id="vllm"),
        pytest.param("vllm", "bfloat16", False, marks=pytest.mark.gpu, id="vllm-graphs"),
    ],
)
async def test_engines_record_what_transformers_chooses(
    tmp_path: Path, name: str, dtype: str, eager: bool
) -> None:
    """Nearly: rounding changes a choice now and then."""
    kind: torch.dtype = getattr(torch, dtype)
    # SGLang has no layers without experts in this family
    dense = (0,) if name == "vllm" else ()
    models = {seed: tiny_experts(seed, dense=dense, dtype=kind) for seed in (1, 2)}
    models[1].save_pretrained(tmp_path / "model")
    own: dict[str, Any] = sglang_settings() if name == "sglang" else {}
    config = EngineConfig(
        name=name,
        dtype=dtype,
        max_model_len=256,
        memory_fraction=0.1,
        enforce_eager=eager,
        enable_return_routed_experts=True,
        **own,
    )
    engine = make_engine(config, tmp_path / "model", "engine.0")
    try:
        await engine.start()
        before = await complete(engine)
        manifest = write_shm(tmp_path / "v0", weights(models[2], kind), 0)
        await engine.stage(manifest)
        await engine.commit(manifest)
        after = await complete(engine)
    finally:
        await engine.close()
    for model, completions in ((models[1], before), (models[2], after)):
        assert agreement(model, completions) > 0.9
    assert agreement(models[1], after) < 0.7


async def complete(engine: Engine) -> list[Completion]:
    async with asyncio.TaskGroup() as tasks:
        sampling = Sampling(max_tokens=30)
        running = [
            tasks.create_task(engine.generate(Request(f"{n}/0", prompt, sampling)), name=f"request-{n}")
            for n, prompt in enumerate(PROMPTS)
        ]
    return [task.result() for task in running]


def agreement(model: PreTrainedModel, completions: list[Completion]) -> float:
    """Share of the tokens for which an engine recorded the experts that the model chooses."""
    same = []
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert completion.experts is not None
        wanted = chosen_by(model, [*prompt, *completion.tokens][:-1])
        assert completion.experts.shape == wanted.shape
        same.append((np.sort(completion.experts) == np.sort(wanted)).all(axis=(1, 2)))
    return float(np.concatenate(same).mean())


@torch.no_grad()
def chosen_by(model: PreTrainedModel, tokens: list[int]) -> NDArray[np.int64]:
    """From transformers' own record of the logits of its routers, [tokens, layers, K]."""
    logits = model(torch.tensor([tokens]), output_router_logits=True).router_logits
    return np.stack([layer.topk(2).indices.numpy() for layer in logits], axis=1)
