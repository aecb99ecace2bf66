"""Tests that backends are made by name, and that reading the names imports no heavy library."""

import subprocess
import sys
from pathlib import Path

import pytest

from protocol.errors import SettingsError
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


def test_a_backend_is_imported_before_it_is_made_and_an_unknown_one_is_left_to_its_refusal() -> None:
    code = (
        "import sys; from trainer.registry import import_backend; import_backend('referense'); "
        "early = 'torch' in sys.modules; import_backend('reference', with_critic=True); "
        "print(early, *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    early, *loaded = done.stdout.split()
    assert early == "False"
    assert {"torch", "trainer.reference.backend", "trainer.reference.critic"} <= set(loaded)


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


def test_megatron_is_not_imported_for_others() -> None:
    modules = "trainer.registry, trainer.step.plan, trainer.weights.registry"
    code = f"import sys, {modules}; sys.exit('megatron' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_reading_the_registered_names_imports_no_torch() -> None:
    registries = "trainer.registry, trainer.algorithms.registry, trainer.weights.registry"
    code = f"import sys, {registries}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
