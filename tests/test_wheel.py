"""Tests the wheel that is built from the tree, installed in an environment of its own, far from the tree.

That environment sees the libraries of this one, through a path file, and nothing else of it.
"""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.changes import slow_unless_changed

pytestmark = pytest.mark.xdist_group("wheel")  # one fixture for the module

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("deploy", "protocol", "reward", "rollout", "services", "trainer")
DRY = (
    "--set", "engine.name=scripted", "--set", "trainer.backend=scripted", "--set", "eval.at_end=false",
    "--set", "monitor.enabled=false", "--set", "services.spares=false",
)  # fmt: skip


def call(*command: str | Path, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with nothing of the test's environment but `PATH` and what is given."""
    path = {"PATH": "/usr/bin:/bin", "HOME": str(cwd)}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**path, **environ},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wheel")
    files = subprocess.run(
        ["git", "ls-files", "--", *PACKAGES, "pyproject.toml", "README.md", "LICENSE", "tether.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    for name in files:
        (place / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "tree" / name).write_bytes((ROOT / name).read_bytes())
    build = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    result = call(sys.executable, *build, "-w", place, place / "tree", cwd=place)
    assert result.returncode == 0, result.stderr
    (built,) = place.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def home(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the environment `venv`, in which the wheel is installed."""
    place = tmp_path_factory.mktemp("elsewhere")
    made = call(sys.executable, "-m", "venv", "--without-pip", place / "venv", cwd=place)
    assert made.returncode == 0, made.stderr
    install = (
        "-m",
        "pip",
        "--python",
        place / "venv/bin/python",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
    )
    installed = call(sys.executable, *install, wheel, cwd=place)
    assert installed.returncode == 0, installed.stderr
    (packages,) = (place / "venv/lib").glob("python*/site-packages")
    places = [path for path in sys.path if path.endswith("site-packages")]  # of environments in layers
    (packages / "libraries.pth").write_text("\n".join(places) + "\n")
    return place


def test_the_wheel_has_every_file_that_is_read_at_run_time(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    read = [
        path.relative_to(ROOT)
        for pattern in ("services/**/*.lua", "services/monitor/assets/*", "deploy/configs/*.toml",
                        "deploy/examples/**/*.toml", "deploy/examples/**/*.jsonl")
        for path in ROOT.glob(pattern)
    ]  # fmt: skip
    assert len(read) > 40
    assert {f"rollout/engines/contract/{name}.py" for name in ("suite", "bench", "models")} <= inside
    assert {str(path) for path in read} - inside == set()
    assert {name.split("/")[0] for name in inside if "dist-info" not in name} == {*PACKAGES, "tether.py"}


@slow_unless_changed(
    "pyproject.toml", "tether.py", "services/cli.py", "services/launcher/", "tests/test_wheel.py",
)  # fmt: skip
def test_the_wheel_runs_far_from_the_tree(home: Path) -> None:
    (packages,) = (home / "venv/lib").glob("python*/site-packages")
    config = packages / "deploy/configs/demo.toml"
    prompts = packages / "deploy/examples/max3/prompts.jsonl"
    result = call(
        home / "venv/bin/tether", "up", config, "--run-dir", home / "run", "--steps", "2", *DRY,
        "--set", f"prompts.path={prompts}", cwd=home,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert len((home / "run/metrics.jsonl").read_text().splitlines()) == 2
    verified = call(home / "venv/bin/tether", "verify", home / "run", cwd=home)
    assert (verified.returncode, verified.stderr) == (0, "")
    assert "violations 0" in verified.stdout


@slow_unless_changed("rollout/engines/contract/", "docs/own_code.md")
def test_the_contract_of_engines_runs_from_the_wheel(home: Path) -> None:
    page = (ROOT / "docs/own_code.md").read_text()
    block = re.search(r'```python title="mine/test_my_engine.py"\n(.*?)```', page, re.DOTALL)
    assert block is not None
    (home / "test_my_engine.py").write_text(block[1].replace("my_engine:Gentle", "hf"))
    suite = ("test_my_engine.py", "-q", "-p", "no:cacheprovider", "-k", "fresh_engine or abort_returns")
    result = call(home / "venv/bin/python", "-m", "pytest", *suite, cwd=home)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2 passed" in result.stdout


@pytest.mark.parametrize("package", ["services", "trainer"])
def test_a_package_of_the_same_name_on_the_path_does_not_stand_in_the_way(home: Path, package: str) -> None:
    other = home / "other"
    (other / package).mkdir(parents=True, exist_ok=True)
    (other / package / "__init__.py").write_text("raise RuntimeError('not of tether')")
    result = call(home / "venv/bin/tether", "verify", home, cwd=home, PYTHONPATH=str(other))
    assert result.returncode == 2
    assert result.stderr.startswith("tether: no audit log ")


def test_a_distribution_that_has_replaced_a_package_is_named(home: Path) -> None:
    (packages,) = (home / "venv/lib").glob("python*/site-packages")
    (packages / "services/__init__.py").write_text("")
    result = call(home / "venv/bin/tether", "--help", cwd=home)
    assert result.returncode == 1
    assert f"{packages}/services/__init__.py belongs to another distribution" in result.stderr
