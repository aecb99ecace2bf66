"""Makes the model of the cases once: what a naive loop computes with it is kept by its directory."""

from pathlib import Path

import pytest

from tests.trainer.recomputed.cases import model_dir


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_dir(tmp_path_factory.mktemp("models"))
