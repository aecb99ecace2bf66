"""Launches each layout once for the tests of its results, and marks what takes more than two processes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.changes import slow_unless_changed
from tests.trainer.fsdp import ranks as sharded
from tests.trainer.megatron.launch import launch
from tests.trainer.megatron.layouts import BACK, DEAR, FROM, LAYOUTS, SLOW
from tests.trainer.megatron.models import ALL_MODELS, save_model, step_batch
from tests.trainer.megatron.plain import PlainTrainer
from tests.trainer.megatron.ranks import ALGORITHM, STEPS, restore_from, run

IF_CHANGED = slow_unless_changed(
    "trainer/fsdp/", "trainer/layers/", "trainer/optimizers/", "trainer/reference/", "trainer/weights/"
)
"""Marks tests of that backend."""
MEGATRON_CHANGED = slow_unless_changed(
    "trainer/megatron/", "trainer/layers/", "trainer/functional/", "trainer/optimizers/", "trainer/backends/",
    "trainer/ranks/", "trainer/weights/", "trainer/storage/", "protocol/weights/", "rollout/staging/",
    "tests/trainer/megatron/", "deploy/locks/cpu.txt",
)  # fmt: skip
"""Marks layouts in `DEAR`."""


def marks_of(layout: str) -> list[pytest.MarkDecorator]:
    if layout in sharded.SHARDED:
        return [pytest.mark.slow if sharded.SHARDED[layout].world_size > 2 else IF_CHANGED]
    if LAYOUTS[layout].world_size > 2 or layout in SLOW:
        return [pytest.mark.slow]
    return [MEGATRON_CHANGED] if layout in DEAR else []


def same_bits(left: Path, right: Path) -> bool:
    a, b = load_file(left), load_file(right)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Runs:
    """Results by layout, each launched once, when first asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.models = root / "models"
        for name in ALL_MODELS:
            save_model(name, self.models)
        self._started: set[str] = set()
        self._plain: dict[tuple[str, bool], tuple[list[dict[str, float]], dict[str, torch.Tensor]]] = {}

    def __call__(self, layout: str) -> Path:
        if layout not in self._started:
            # Also when it fails: its other tests then fail on what is missing, instead of waiting once more.
            self._started.add(layout)
            if layout in sharded.SHARDED:
                if layout in sharded.FROM:
                    self(sharded.FROM[layout])
                self._shard(layout)
            elif LAYOUTS[layout].world_size == 1:
                run(layout, self.models, self.root / layout)
            else:
                for source in FROM.get(layout, ()):
                    self(source)
                arguments = (layout, str(self.models), str(self.root / layout))
                launch(
                    LAYOUTS[layout].world_size,
                    "tests.trainer.megatron.ranks",
                    *arguments,
                    logs=self.root / f"logs-{layout}",
                )
        return self.root / layout

    def _shard(self, layout: str) -> None:
        ranks, out = sharded.SHARDED[layout].world_size, self.root / layout
        if ranks == 1:
            sharded.run(layout, self.models, out)
            return
        arguments = layout, str(self.models), str(out)
        launch(ranks, "tests.trainer.fsdp.ranks", *arguments, logs=self.root / f"logs-{layout}")

    def restore_back(self) -> None:
        """Restore in a single rank what the ranks of other layouts saved."""
        self("single")
        for source in BACK:
            self(source)
            restore_from(source, "single", self.models, self.root / "single")

    def plain(
        self, model: str, *, balanced: bool = True
    ) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
        """Statistics of each step and the weights after the last, from plain torch; `balanced`: with losses
        that balance experts."""
        if (model, balanced) not in self._plain:
            trainer = PlainTrainer(model, ALGORITHM)
            trainer.balance = trainer.balance if balanced else None
            stats = [trainer.step(step_batch(model, step)) for step in range(STEPS)]
            self._plain[model, balanced] = stats, trainer.weights()
        return self._plain[model, balanced]
