"""Tests the creation of engines by name."""

from pathlib import Path

import pytest

from protocol.errors import EngineError, SettingsError
from protocol.weights.lora import LoraConfig
from rollout.engines.base import EngineConfig
from rollout.engines.registry import ENGINES, engine_class, import_engine, make_engine


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


OWN = """
from rollout.engines.base import Engine
from rollout.engines.scripted import ScriptedEngine

class Mine(ScriptedEngine):
    def __init__(self, config, model_dir, incarnation):
        super().__init__(config, model_dir, incarnation)
        self.factor = config.options["factor"]

class Half(Engine):
    async def start(self): ...

class Other: ...
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_engine_of_test.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "own_engine_of_test"


def test_an_engine_of_the_user_is_made_with_its_options(module: str, tmp_path: Path) -> None:
    config = EngineConfig(name=f"{module}:Mine", options={"factor": 2})
    assert import_engine(config) is None
    made = make_engine(config, tmp_path, "engine.1")
    assert (type(made).__name__, made.factor) == ("Mine", 2)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Half", r"own_engine_of_test.py lacks abort, adopt, check, close, commit, generate, pause"),
        ("Other", "is not a subclass of rollout.engines.base.Engine"),
        ("Mime", "has no 'Mime'; did you mean 'Mine'"),
    ],
)
def test_an_engine_of_the_user_that_is_none_is_refused(module: str, name: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        engine_class(f"{module}:{name}")


def test_an_engine_of_the_user_serves_no_adapters(module: str, tmp_path: Path) -> None:
    config = EngineConfig(name=f"{module}:Mine", options={"factor": 2})
    with pytest.raises(SettingsError, match=r"setting lora\.rank: engine '.*:Mine' does not serve adapters"):
        make_engine(config, tmp_path, "engine.1", LoraConfig(rank=4))
