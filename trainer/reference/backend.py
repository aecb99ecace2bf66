"""Trains with plain torch and transformers on one device: slow, short, the oracle of the other backends."""

import copy
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from protocol.choices import checked_name
from protocol.device.checkpoint_views import checkpoint_views, model_tensors
from protocol.errors import SettingsError
from protocol.weights.lora import NO_ADAPTERS, LoraConfig
from trainer.algorithms.base import Algorithm
from trainer.backends.base import NOTHING_TRAINED, Backend, FrozenModel, FrozenSpec, Replicas, StepStats
from trainer.backends.engine_attach import Angles, check_model_buffers, check_parameters, take_parameters
from trainer.backends.last_states import LastStates, read_by_output
from trainer.batch import Batch, trained_tokens
from trainer.config import OptimizerConfig, ParallelConfig, TrainerConfig
from trainer.lora import merged, with_dropout, without_adapters
from trainer.reference.frozen import frozen, in_dtype, load_model
from trainer.reference.logprobs import evaluate, forward, logprobs_at, padded, passes
from trainer.reference.lora import attach
from trainer.reference.optimizer_step import MasterStepper, masters_of
from trainer.reference.state import CheckpointedModel
from trainer.reference.values import ValueModel, values_at
from trainer.roles.row_scores import token_evaluator
from trainer.step.loss import micro_batch_loss
from trainer.step.measures import StepMeasures

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ReferenceBackend(CheckpointedModel, Backend):
    """Trainer with fp32 masters on one rank.

    Deterministic on the CPU: the same batches from the same checkpoint produce the same bits. The model's
    dropout is off, so E = 0 is on-policy. Vectors (norms and biases) have no weight decay, as in
    Megatron-core.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        optimizer: OptimizerConfig,
        trainer: TrainerConfig,
        algorithm: Algorithm,
        adapters: LoraConfig = NO_ADAPTERS,
        shared: bool = False,
    ) -> None:
        """Load the model of a Hugging Face directory; arguments as in `make_backend`.

        With `shared`, masters are separate from the parameters in every dtype, and are the published tensors.
        `attach` may follow.

        Raises:
            SettingsError: more than one rank, an unknown dtype or device, or transformers cannot load the
                directory.
        """
        require_one_rank()
        checked_name(trainer.dtype, DTYPES, "setting trainer.dtype:")
        torch.set_num_threads(trainer.threads)
        torch.manual_seed(trainer.seed)
        self._device = choose_device(trainer.device)
        self._config, self._trainer, self._algorithm = optimizer, trainer, algorithm
        self._model = load_model(model_dir, "model.path").to(self._device)
        self.architecture = type(self._model).__name__
        self._trained: dict[str, torch.nn.Parameter] = dict(self._model.named_parameters())
        if adapters.rank:
            self.lora = adapters
            self.targets, self._trained = attach(self._model, adapters, trainer.seed)
        self._masters = masters_of(self._trained, separate_masters=shared or trainer.dtype != "float32")
        self._shared = shared
        in_dtype(self._model, DTYPES[trainer.dtype])
        self._stepper = MasterStepper(self._trained, self._masters, optimizer, self._embeddings())
        self._reference: torch.nn.Module | None = None
        super().__init__(self._device)

    @property
    def model(self) -> torch.nn.Module:
        """The model in training, for tests that sample from it."""
        return self._model

    def train_step(self, batch: Batch) -> StepStats:
        measures = StepMeasures.of_batch(batch, self._algorithm.config)
        packed = passes(batch, self._trainer)
        with with_dropout(self._model, self.lora, (self._trainer.seed, self._stepper.steps, 0)):
            vectors = [self._accumulate(batch.select(part).to(self._device), measures) for part in packed]
        vector = measures.join(vectors, self._device)
        grad_norm, skipped = (
            self._stepper.step(measures.lr_scale(vector)) if measures.tokens else (0.0, NOTHING_TRAINED)
        )
        stats = measures.stats(vector, grad_norm=grad_norm, skipped=skipped)
        computed = sum(len(samples) * int(batch.lengths[samples].max()) for samples in packed)
        return msgspec.structs.replace(
            stats,
            micro_batches=len(packed),
            padding_share=1 - len(batch.tokens) / computed,
            shared_share=0.0,
            computed_tokens=len(batch.tokens),
        )

    def logprobs(self, batch: Batch) -> torch.Tensor:
        return evaluate(logprobs_at, self._model, batch, self._trainer)

    def reference_logprobs(self, batch: Batch) -> torch.Tensor:
        if self._reference is None:
            raise RuntimeError("keep_reference has not been called")
        with without_adapters(self._reference):
            return evaluate(logprobs_at, self._reference, batch, self._trainer)

    def keep_reference(self) -> None:
        """Keep a copy of the current weights as reference, or use the base model of the adapters. Idempotent.

        Checkpoints do not contain the reference: call before `restore`.
        """
        if self._reference is None and self.lora.rank:
            self._reference = self._model
        elif self._reference is None:
            self._reference = copy.deepcopy(self._model).requires_grad_(False)

    def load_frozen(self, spec: FrozenSpec) -> FrozenModel:
        return load_frozen(spec, self._trainer, self._device)

    @torch.no_grad()
    def last_states(self, batch: Batch) -> LastStates:
        tokens, sample, position = padded(batch.to(self._device))
        states = read_by_output(self._model, {"input_ids": tokens})[sample, position - 1]
        model: Any = self._model
        layers = model.get_input_embeddings(), model.get_output_embeddings()
        return LastStates(states, *(layer.weight.detach() for layer in layers))

    @property
    def device(self) -> torch.device:
        return self._device

    def masters(self) -> Mapping[str, torch.Tensor]:
        return self._masters if self._shared else super().masters()

    def attach(self, parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> None:
        check_parameters(self._trained, self._masters, parameters)
        check_model_buffers(dict(self._model.named_buffers()), buffers, _rotaries(self._model))
        take_parameters(self._trained, parameters)
        self._stepper.publishes = False

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._shared or self.lora.rank:
            for name, parameter in (self._masters if self._shared else self._trained).items():
                yield name, parameter.detach()
        else:
            yield from self.export_model()

    @torch.no_grad()
    def export_model(self) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = {n: tensor for n, tensor in model_tensors(self._model).items() if ".lora." not in n}
        if self._shared:
            dtype = DTYPES[self._trainer.dtype]
            tensors |= {name: master.detach().to(dtype) for name, master in self._masters.items()}
        for target in self.targets:
            tensors[target.weight] = merged(target, tensors[target.weight], self._trained, self.lora)
        yield from checkpoint_views(self._model, tensors).items()

    def _offloadable_tensors(self) -> tuple[Iterable[torch.Tensor], Iterable[torch.Tensor]]:
        if self._shared:
            raise SettingsError(
                "setting weights.transport: with 'shared' the trainer's state stays where the engine reads it"
            )
        return super()._offloadable_tensors()

    def _modules(self) -> list[torch.nn.Module]:
        return [model for model in (self._model, self._reference) if model is not None]

    def close(self) -> None:
        """Release the reference model and the gradients."""
        self._reference = None
        super().close()

    def _embeddings(self) -> list[torch.Tensor]:
        """Return the trained masters of the embedding and of the output layer."""
        model: Any = self._model
        layers = (model.get_input_embeddings(), model.get_output_embeddings())
        found = [layer.weight for layer in layers if layer is not None]
        return [self._masters[name] for name, p in self._trained.items() if any(p is one for one in found)]

    def _identity(self) -> dict[str, str]:
        lora = f"rank {self.lora.rank} scaling {self.lora.scaling:g}" if self.lora.rank else "none"
        optimizer = {} if self._config.name == "adamw" else {"optimizer": self._config.name}
        return {
            "backend": "reference",
            "world_size": "1",
            "architecture": self.architecture,
            "lora": lora,
            **optimizer,
        }

    def _accumulate(self, part: Batch, measures: StepMeasures) -> torch.Tensor:
        """Add one micro-batch's gradient to the masters' gradients; return the measurements."""
        tokens = trained_tokens(part)
        logprobs, entropy = forward(self._model, part, tokens.place)
        loss, vector = micro_batch_loss(self._algorithm, measures, tokens, logprobs, entropy)
        loss.backward()
        self._stepper.collect()
        return vector


def load_frozen(spec: FrozenSpec, trainer: TrainerConfig, device: torch.device) -> FrozenModel:
    """Load a frozen model on a device.

    Raises:
        SettingsError: transformers cannot load the model.
    """
    setting, dtype = f"{spec.role}.path", DTYPES[trainer.dtype]
    if spec.is_classifier:
        classifier = ValueModel(spec.directory, setting).to(device)
        in_dtype(classifier, dtype)
        run = partial(evaluate, values_at, classifier, trainer=trainer)
        return frozen(classifier, token_evaluator(spec, run))
    model = in_dtype(load_model(spec.directory, setting).to(device), dtype)
    return frozen(model, partial(evaluate, logprobs_at, model, trainer=trainer))


def load_remote_frozen(
    spec: FrozenSpec, parallel: ParallelConfig, trainer: TrainerConfig
) -> tuple[FrozenModel, Replicas]:
    """Load a frozen model; arguments as in `trainer.registry.make_remote_frozen`.

    Raises:
        SettingsError: transformers cannot load the model, or there are several ranks.
    """
    require_one_rank()
    torch.set_num_threads(trainer.threads)
    return load_frozen(spec, trainer, choose_device(trainer.device)), ((0,),)


def _rotaries(model: Any) -> list[Angles]:
    """Return the rotary embedding of a transformers model; empty if it has none."""
    rotary: Any = getattr(model.base_model, "rotary_emb", None)

    def halves(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        like = torch.empty(0, dtype=torch.float32, device=positions.device)
        cos, sin = (values[0].chunk(2, dim=-1)[0] for values in rotary(like, positions[None]))
        return cos, sin

    return [] if rotary is None else [halves]


def require_one_rank() -> None:
    """Check that this process is the only rank.

    Raises:
        SettingsError: there are several ranks.
    """
    ranks = (
        dist.get_world_size()
        if dist.is_available() and dist.is_initialized()
        else int(os.environ.get("WORLD_SIZE", "1"))
    )
    if ranks != 1:
        raise SettingsError(
            f"the reference backend runs on one rank, not {ranks}: set trainer.backend to megatron, or "
            "parallel sizes to 1"
        )


def choose_device(name: str) -> torch.device:
    """Return the device for `trainer.device`.

    Raises:
        SettingsError: a GPU is requested but missing.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise SettingsError("trainer.device is cuda, but torch sees no GPU: use auto or cpu")
    return torch.device(name)
