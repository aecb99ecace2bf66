"""Tests what the `tether` command and the services import: large libraries only where they are used."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from services.settings.load import dump_settings, load_settings
from tests.integration.command import environment, tether_here
from tests.integration.loop import ROOT
from tests.services.monitor.runs import recorded_run

HEAVY = {"torch", "transformers", "matplotlib", "aiohttp", "prometheus_client", "datasets", "safetensors"}
SETTINGS = HEAVY | {"services.settings.sections", "redis", "numpy", "asyncio", "zmq"}
"""What a command that reads no settings does without."""

MODULES_AT_EXIT = """
import atexit, sys
atexit.register(lambda: print("MODULES", *sys.modules, file=sys.stderr))
from services.cli import main
sys.argv[0] = "tether"
main()
"""


def imported(program: str, *arguments: str, **variables: str) -> set[str]:
    """Run a program that prints its modules at the end; return their names."""
    result = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env=environment(**variables),
        capture_output=True,
        text=True,
        check=False,
    )
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("MODULES ")]
    return set(line.split()[1:])


@pytest.mark.parametrize("arguments", [("--help",), ("up", "--help"), ("status", "--help")])
def test_help_imports_nothing_that_it_does_not_print_with(arguments: tuple[str, ...]) -> None:
    assert imported(MODULES_AT_EXIT, *arguments) & SETTINGS == set()


def test_verify_needs_no_settings_and_no_ledger(tmp_path: Path) -> None:
    (tmp_path / "audit.jsonl").touch()
    assert imported(MODULES_AT_EXIT, "verify", str(tmp_path)) & (SETTINGS - {"asyncio"}) == set()


def test_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.touch()
    result = tether_here("scale", run_dir, "rollouts=2")
    assert (result.returncode, result.stderr) == (2, f"tether: {run_dir / 'lock'}: Not a directory\n")


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "is empty": lambda _: b"",
    "file is not a database": lambda _: bytes(range(256)) * 100,
    "disk image is malformed": lambda whole: whole[: len(whole) // 2],
}


@pytest.mark.parametrize("problem", DAMAGE)
def test_a_damaged_spool_of_a_past_run_ends_with_two(problem: str, tmp_path: Path) -> None:
    run_dir = recorded_run(tmp_path)
    spool = run_dir / "spool.sqlite"
    spool.write_bytes(DAMAGE[problem](spool.read_bytes()))
    commands = (
        ("samples", run_dir),
        ("trace", run_dir, 5),
        ("replay", run_dir, "--step", 6),
        ("check-algorithm", "grpo", "--run", run_dir),
    )
    for command in commands:
        result = tether_here(*command)
        (line,) = result.stderr.splitlines()
        assert result.returncode == 2
        assert re.match(f"tether: spool {spool}:? .*{problem}", line), line


def test_a_port_that_is_none_is_refused(tmp_path: Path) -> None:
    result = tether_here("monitor", tmp_path, "--port", "99999")
    assert (result.returncode, "--port" in result.stderr) == (2, True)


@pytest.mark.parametrize("arguments", [("status",), ("drain",), ("set", "max-staleness", "2")])
def test_commands_on_a_ledger_import_settings_and_client_only(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """The ledger does not answer: what a command needs afterwards, it has imported before."""
    dump_settings(load_settings(environ={}), tmp_path / "settings.json")
    command, *rest = arguments
    modules = imported(
        MODULES_AT_EXIT, command, str(tmp_path), *rest, TETHER_REDIS_URL="redis://127.0.0.1:1/0"
    )
    assert {"redis", "services.settings.sections"} <= modules
    assert modules & HEAVY == set()


SERVICES = (
    "services.ingest.service", "services.reward", "services.monitor.service", "services.rollout.service",
    "services.prepare", "services.launcher.supervisor",
)  # fmt: skip
IMPORTS = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
    print(module, *{"torch", "transformers", "matplotlib", "safetensors"} & sys.modules.keys())
"""


def test_services_without_tensors_do_not_import_torch() -> None:
    """In one process: what none of them imports is not imported for any."""
    words = [sys.executable, "-c", IMPORTS, *SERVICES]
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == list(SERVICES)


def test_check_reads_model_and_prompts_without_torch(tmp_path: Path) -> None:
    arguments = ("check", "deploy/configs/demo.toml", "--set", f"run.dir={tmp_path}/run")
    assert "torch" not in imported(MODULES_AT_EXIT, *arguments)
