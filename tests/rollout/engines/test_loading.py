"""Tests models that are loaded concurrently in one process, and a cancelled start."""

import asyncio
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from protocol.device.checkpoint_shapes import checkpoint_shapes
from rollout.engines.base import EngineConfig
from rollout.engines.contract.models import tiny_model
from rollout.engines.registry import make_engine
from trainer.random_model import ScratchConfig, build_scratch


async def test_models_loaded_concurrently_leave_transformers_unchanged(tmp_path: Path) -> None:
    ties = PreTrainedModel.tie_weights
    tiny_model(1, tied=True).save_pretrained(tmp_path / "model")
    tiny_model(1).config.save_pretrained(tmp_path / "bare")
    engines = [make_engine(EngineConfig(name="hf"), tmp_path / "model", f"e{number}") for number in range(8)]
    async with asyncio.TaskGroup() as group:
        for number, engine in enumerate(engines):
            group.create_task(engine.start())
            group.create_task(asyncio.to_thread(checkpoint_shapes, tmp_path / "bare"))
            group.create_task(
                asyncio.to_thread(build_scratch, ScratchConfig(), tmp_path / f"scratch{number}")
            )
    for engine in engines:
        await engine.close()
    assert PreTrainedModel.tie_weights is ties


async def test_cancelled_start_has_ended_when_the_engine_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model(1).save_pretrained(tmp_path / "model")
    engine = make_engine(EngineConfig(name="hf"), tmp_path / "model", "e")
    loaded, load = [], engine._load

    def watched() -> object:
        model = load()
        loaded.append(model)
        return model

    monkeypatch.setattr(engine, "_load", watched)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await engine.start()
    await engine.close()
    assert len(loaded) == 1
