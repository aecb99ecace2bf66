"""Makes trainers and engines that compute with one copy of a tiny model's weights, in one process."""

from contextlib import ExitStack, closing
from pathlib import Path

import torch

from protocol.weights.lora import NO_ADAPTERS, LoraConfig
from tests.trainer.attached import Tensors
from tests.trainer.megatron.models import OPTIMIZER, save_model
from tests.trainer.megatron.ranks import ALGORITHM
from trainer.config import ParallelConfig, TrainerConfig
from trainer.megatron.backend import MegatronBackend
from trainer.megatron.inference.model import CachedModel


class Place:
    """A model directory, and what is made of it: all in one process, closed at the end."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory = directory
        self._stack = stack

    def trainer(
        self,
        name: str = "qwen2",
        dtype: str = "float32",
        *,
        shared: bool = True,
        adapters: LoraConfig = NO_ADAPTERS,
    ) -> MegatronBackend:
        model_dir = save_model(name, self.directory)
        settings = TrainerConfig(device="cpu", dtype=dtype)
        made = MegatronBackend(
            model_dir,
            parallel=ParallelConfig(),
            optimizer=OPTIMIZER,
            trainer=settings,
            algorithm=ALGORITHM,
            shared=shared,
            adapters=adapters,
        )
        return self._stack.enter_context(closing(made))

    def engine(self, name: str = "qwen2", dtype: str = "float32") -> CachedModel:
        return self._stack.enter_context(
            closing(CachedModel(save_model(name, self.directory), dtype=dtype, running=2, length=16))
        )


def exported(backend: MegatronBackend) -> Tensors:
    return {name: tensor.clone() for name, tensor in backend.export()}


def same_bits(a: Tensors, b: Tensors) -> bool:
    return list(a) == list(b) and all(
        torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)) for name in a
    )
