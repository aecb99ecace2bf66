"""Tests that backends are made by name, and that reading the names imports no heavy library."""

import subprocess
import sys
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from tests.changes import slow_unless_changed
from trainer.algorithms import AlgorithmConfig, make_algorithm
from trainer.backends.scripted import ScriptedBackend
from trainer.config import OptimizerConfig, ParallelConfig, TrainerConfig
from trainer.reference.backend import ReferenceBackend
from trainer.registry import make_backend, make_critic
from trainer.roles.config import CriticConfig

ROOT = Path(__file__).resolve().parents[2]
ALGORITHM = make_algorithm(AlgorithmConfig())


def make(name: str, model_dir: Path, **parallel: int) -> object:
    return make_backend(
        model_dir,
        parallel=ParallelConfig(**parallel),
        optimizer=OptimizerConfig(),
        trainer=TrainerConfig(backend=name),
        algorithm=ALGORITHM,
    )


def test_backends_are_found_by_name(model_dir: Path) -> None:
    assert isinstance(make("reference", model_dir), ReferenceBackend)
    assert isinstance(make("scripted", model_dir), ScriptedBackend)


NAMES = """
import sys
import trainer.registry, trainer.algorithms.registry, trainer.weights.registry
from trainer.registry import import_backend
import_backend("referense")
print(*sys.modules)
"""
LOADED = """
import trainer.step.plan
import_backend("reference", with_critic=True)
print(*sys.modules)
"""


def imported(program: str) -> list[set[str]]:
    """Modules that a program has imported at each line that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [set(line.split()) for line in done.stdout.splitlines()]


def test_reading_the_registered_names_imports_no_torch() -> None:
    (names,) = imported(NAMES)
    assert "trainer.weights.registry" in names
    assert "torch" not in names


@slow_unless_changed(
    "trainer/registry.py", "trainer/backends/", "trainer/reference/", "trainer/step/",
    "trainer/fsdp/backend.py", "trainer/megatron/backend.py",
)  # fmt: skip
def test_a_backend_is_imported_before_it_is_made_and_megatron_for_no_other() -> None:
    _, loaded = imported(NAMES + LOADED)
    assert {"torch", "trainer.reference.backend", "trainer.reference.critic", "trainer.step.plan"} <= loaded
    assert "megatron" not in loaded


def test_impossible_backend_is_refused(model_dir: Path) -> None:
    with pytest.raises(SettingsError, match=r"'referense' is not known; did you mean 'reference'\?"):
        make("referense", model_dir)
    with pytest.raises(SettingsError, match="runs on one rank"):
        make("reference", model_dir, data_parallel_size=2)


def test_a_backend_without_a_critic_is_refused(model_dir: Path) -> None:
    trainer = TrainerConfig(backend="scripted")
    options = {"optimizer": OptimizerConfig(), "trainer": trainer, "config": CriticConfig()}
    with pytest.raises(SettingsError, match=r"with a critic: 'scripted' is not known"):
        make_critic(ScriptedBackend(trainer=trainer), model_dir, **options)  # type: ignore[arg-type]
