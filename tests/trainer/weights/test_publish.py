"""The digest of what would be published: a manifest's, computed without a copy of the model."""

import gc
from collections.abc import Iterator
from pathlib import Path

import torch

from trainer.backends.scripted import ScriptedBackend
from trainer.config import TrainerConfig, WeightConfig
from trainer.execution.commands import DigestWeightsCommand
from trainer.execution.executor import Executor
from trainer.roles.models import RankModels
from trainer.weights.files import disk_sender
from trainer.weights.publish import publish

NUMBER = 4
SHAPE = (3, 617)
"""Shape of each tensor, and of no other in the process."""


class GatheringBackend(ScriptedBackend):
    """Makes each tensor when it is asked for, as one that gathers tensors from other ranks does."""

    def __init__(self) -> None:
        super().__init__(trainer=TrainerConfig(backend="scripted"))
        self.held_most = 0
        """Tensors in the process while one is asked for."""

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(NUMBER):
            held = sum(type(found) is torch.Tensor and found.shape == SHAPE for found in gc.get_objects())
            self.held_most = max(self.held_most, held)
            yield f"layer.{NUMBER - number}", torch.full((SHAPE[1], SHAPE[0]), float(number)).T


def test_digest_of_the_weights_is_their_manifests_and_holds_no_copy(tmp_path: Path) -> None:
    gc.collect()
    gc.freeze()  # of what other tests have left, millions of objects would be looked at each time
    for dtype in ("float32", "bfloat16"):
        backend = GatheringBackend()
        sender = disk_sender(WeightConfig(), tmp_path / dtype)
        manifest = publish(backend, sender, "e", 1, dtype)
        assert manifest is not None
        backend.held_most = 0
        assert Executor(RankModels(backend)).lead(DigestWeightsCommand(dtype)) == manifest.digest
        assert backend.held_most <= 2
