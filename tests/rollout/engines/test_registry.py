"""Tests the creation of engines by name."""

from pathlib import Path

import pytest

from protocol.errors import EngineError, SettingsError
from rollout.engines.base import EngineConfig
from rollout.engines.registry import ENGINES, make_engine


def test_unknown_engine_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"engine 'vlm' is not known; did you mean 'vllm'\?"):
        make_engine(EngineConfig(name="vlm"), tmp_path, "e")


@pytest.mark.parametrize("name", sorted(ENGINES))
async def test_start_without_model_directory_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    engine = make_engine(EngineConfig(name=name), tmp_path / "model", "e")
    if name == "scripted":
        await engine.start()
    else:
        with pytest.raises(EngineError, match=r"did you mean .*models"):
            await engine.start()
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await engine.check()
