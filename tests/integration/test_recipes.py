"""The recipes of deploy/examples and the configurations of docs/data.md: they load, fit data of the form that
they name, and run from a hub.

Models are tiny and random; data have a few rows of the right form. The hub is on this machine.
"""

import json
import re
from pathlib import Path

import pytest

from rollout.prompts.named_source import check_names
from rollout.prompts.rows import compile_pattern, parse_template
from services.settings.load import load_settings
from services.tools.check import check_configuration
from tests.changes import slow_unless_changed
from tests.data_sets import math_rows, write_gsm8k, write_math, write_model, write_parquet
from tests.hub_server import HubServer, files_of
from tests.integration.command import audit, tether
from tests.integration.loop import ROOT
from trainer.storage.checksums import is_sealed

pytestmark = pytest.mark.xdist_group("recipes")  # one fixture for the module

RECIPES = sorted(
    str(path.relative_to(ROOT))
    for name in ("gsm8k", "math")
    for path in (ROOT / "deploy/examples" / name).glob("*.toml")
)
BLOCKS = re.findall(r"^```toml\n(.*?)^```$", (ROOT / "docs/data.md").read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("data")
    return {
        "gsm8k": write_gsm8k(directory / "gsm8k", train=40),
        "math": write_math(directory / "math"),
        "math_500": write_parquet(directory / "math-500/test.parquet", math_rows(5, 900)).parent,
    }


def test_there_is_a_recipe_for_each_size() -> None:
    assert [Path(path).name for path in RECIPES] == ["cpu.toml", "eight_gpus.toml", "one_gpu.toml"] * 2


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_fits_its_model_and_its_data(
    recipe: str, model: Path, data: dict[str, Path], tmp_path: Path
) -> None:
    name = Path(recipe).parent.name
    overrides = [f"model.path={model}", f"prompts.path={data[name]}", f"run.dir={tmp_path}"]
    if name == "math":
        overrides.append(f'eval.sets=[{{ name = "math_500", path = "{data["math_500"]}", split = "test" }}]')
    found = check_configuration(str(ROOT / recipe), overrides)
    assert found.problems == []
    assert list(tmp_path.iterdir()) == []


def test_without_the_hub_a_recipe_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    HubServer(url="http://127.0.0.1:9").use(monkeypatch, tmp_path / "cache", offline=True)
    found = check_configuration(str(ROOT / RECIPES[0]), [f"run.dir={tmp_path / 'run'}"])
    (problem,) = found.problems
    assert problem.startswith("model 'HuggingFaceTB/SmolLM2-135M-Instruct' (revision main): ")
    assert "HF_HUB_OFFLINE is set" in problem
    assert list(tmp_path.iterdir()) == []


@slow_unless_changed(
    "services/settings/hub.py",
    "deploy/examples/gsm8k/",
    "tests/hub_server.py",
    "tests/integration/test_recipes.py",
)
def test_a_recipe_runs_from_the_hub_and_records_what_it_used(
    model: Path, data: dict[str, Path], tmp_path: Path
) -> None:
    run_dir, cache = tmp_path / "run", tmp_path / "cache"
    arguments = (
        "up", "deploy/examples/gsm8k/cpu.toml", "--run-dir", str(run_dir), "--steps", "2",
        "--set", "engine.name=scripted", "--set", "trainer.backend=scripted", "--set", "eval.at_end=false",
        "--set", "engine.dtype=float32", "--set", "monitor.enabled=false",
    )  # fmt: skip
    with HubServer().serving() as hub:
        model_commit = hub.repository("model", "HuggingFaceTB/SmolLM2-135M-Instruct").commit(files_of(model))
        data_commit = hub.repository("dataset", "openai/gsm8k").commit(files_of(data["gsm8k"]))
        done = tether(*arguments, **hub.variables(cache))
    assert done.returncode == 0, done.stdout + done.stderr
    assert audit(run_dir)["violations"] == []
    recorded = (run_dir / "hub.json").read_bytes()
    assert is_sealed(recorded)
    assert {
        "model HuggingFaceTB/SmolLM2-135M-Instruct main": model_commit,
        "dataset openai/gsm8k main": data_commit,
    }.items() <= json.loads(recorded).items()
    again = tether(*arguments[:4], "--steps", "3", *arguments[6:], HF_HUB_CACHE=str(cache))  # without the hub
    assert again.returncode == 0, again.stdout + again.stderr
    settings = json.loads((run_dir / "settings.json").read_text())
    assert (settings["model"]["revision"], settings["prompts"]["revision"]) == (model_commit, data_commit)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_a_block_of_the_page_loads(block: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(block)
    settings = load_settings(str(path), environ={})
    check_names(settings.prompts.mixture, "prompts.mixture")
    check_names(settings.eval.sets, "eval.sets")
    for source in (settings.prompts, *settings.prompts.mixture, *settings.eval.sets):
        parse_template(source.template or "")
        compile_pattern(source.answer_pattern or "()")


def test_the_page_has_blocks() -> None:
    assert len(BLOCKS) >= 5
