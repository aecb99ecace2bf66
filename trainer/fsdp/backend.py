"""Trains any causal language model of transformers, sharded over the ranks by torch's FSDP2."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from protocol.device.checkpoint_views import model_tensors
from protocol.errors import SettingsError
from protocol.weights.lora import NO_ADAPTERS, LoraConfig
from trainer.algorithms.base import Algorithm
from trainer.backends.base import NOTHING_TRAINED, Backend, FrozenModel, FrozenSpec, StepStats
from trainer.backends.last_states import LastStates
from trainer.batch import Batch, trained_tokens
from trainer.config import OptimizerConfig, ParallelConfig, TrainerConfig
from trainer.fsdp.adapters import DividedLowRank
from trainer.fsdp.layout import OTHER_LAYERS, adapter_refusal, check_layout
from trainer.fsdp.memory.expected import read_workload
from trainer.fsdp.model import ShardedModel, ShardedValues, load_frozen
from trainer.fsdp.passes import Pass, forget_pass, make_retry
from trainer.fsdp.sharding import resharded_at_end
from trainer.fsdp.shards import ShardPlan, TensorView, plain_views, tensor_views
from trainer.fsdp.stepper import make_stepper
from trainer.layers.attention.kernels import choose_backend
from trainer.lora import merged, with_dropout, without_adapters
from trainer.memory.plan import MemoryPlan
from trainer.ranks.process_group import check_world, join_ranks, own_gpu
from trainer.ranks.publication import Publication, assign_writers
from trainer.reference.backend import DTYPES, choose_device
from trainer.reference.frozen import frozen
from trainer.reference.lora import attach
from trainer.reference.shards import DATA, TENSOR, gathered
from trainer.reference.state import CheckpointedModel
from trainer.roles.row_scores import token_evaluator
from trainer.step.loss import micro_batch_loss
from trainer.step.measures import PassResult, StepMeasures


class FsdpBackend(CheckpointedModel, Backend):
    """Backend with AdamW on sharded float32 parameters.

    A pass gathers one layer at a time, in the training dtype. Samples are packed without padding if the model
    supports packing. Results are independent of the number of ranks. Without torchrun, the world size is one.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        parallel: ParallelConfig,
        optimizer: OptimizerConfig,
        trainer: TrainerConfig,
        algorithm: Algorithm,
        adapters: LoraConfig = NO_ADAPTERS,
        shared: bool = False,
        frozen: Sequence[FrozenSpec] = (),
        critic_dir: Path | None = None,
        served: int = 0,
    ) -> None:
        """Load the model; arguments as in `make_backend`. A collective.

        Raises:
            SettingsError: transformers cannot load the model, the layout is unsupported, or `shared` is set.
        """
        check_layout(parallel, trainer)
        if shared:
            super().masters()  # raises SettingsError
        torch.set_num_threads(trainer.threads)
        torch.manual_seed(trainer.seed)
        self.mesh, self._owns_group = join_mesh(parallel, trainer)
        with ExitStack() as failed:
            failed.callback(self._destroy_group)
            work = read_workload(
                model_dir, parallel, trainer, optimizer, adapters, algorithm.config, frozen, critic_dir
            )
            self._memory = MemoryPlan(work, torch.device(self.mesh.device_type), served)
            self.tokens = self._memory.tokens
            trainer = replace(trainer, micro_batch_tokens=self.tokens)
            self._directory, self._trainer, self._algorithm = model_dir, trainer, algorithm
            self.replicas = self.mesh.mesh.tolist()
            prepare = partial(self._attach, adapters)
            self._model = ShardedModel(model_dir, "model.path", self.mesh, trainer, prepare=prepare)
            model = self._model.module
            self.architecture = type(model).__name__.removeprefix("FSDP")
            self._trained = self._trained_parameters(model)
            self._tensors = {name: t for name, t in model_tensors(model).items() if ".lora." not in name}
            self._views = tensor_views(model, self._tensors)
            self._published, self._plan = self._plan_versions(model)
            self._stepper = make_stepper(self._trained, optimizer, trainer, self.mesh)
            self._reference: ShardedModel | None = None
            self._models: list[ShardedModel | ShardedValues] = [self._model]
            self._retry = make_retry(self._model.passes, self.mesh, self._forget_passes)
            failed.pop_all()
        super().__init__(self.device, self.mesh.get_rank())

    def _attach(self, adapters: LoraConfig, model: Any) -> None:
        if adapters.rank:
            self.lora = adapters
            self.targets, _ = attach(model, adapters, self._trainer.seed, DividedLowRank)
            modules, ranks = [target.module for target in self.targets], self.mesh[TENSOR].size()
            if refusal := adapter_refusal(model.tp_plan, modules, ranks):
                raise SettingsError(f"setting lora.target_modules: {refusal}; {OTHER_LAYERS}")

    def _plan_versions(
        self, model: Any
    ) -> tuple[tuple[tuple[TensorView, ...], Mapping[str, torch.Tensor]], ShardPlan | None]:
        """Return the published tensors with their parameters, and the plan of this rank's pieces."""
        views_of = plain_views if self.lora.rank else partial(tensor_views, model)
        published: Mapping[str, torch.Tensor] = self._trained if self.lora.rank else self._tensors
        share = ShardPlan.make(views_of(published, self.mesh), published, self.mesh)
        return (views_of(published), published), share

    def _trained_parameters(self, model: Any) -> dict[str, torch.nn.Parameter]:
        """Return the trained parameters by the names of their tensors."""
        parameters = dict(model.named_parameters())
        if not self.lora.rank:
            return parameters
        return {
            name: parameters[f"{target.module}.lora.{half}"]
            for target in self.targets
            for name, half in ((target.a, "a"), (target.b, "b"))
        }

    @property
    def why_rows(self) -> str:
        """Why samples are padded rows; empty if samples are packed."""
        return self._model.passes.why_rows

    @property
    def shares_prefixes(self) -> bool:
        return self._model.passes.shares_prefixes

    @property
    def ignored_names(self) -> tuple[str, ...]:
        """Patterns of checkpoint tensors that transformers ignores or derives from other tensors."""
        module: Any = self._model.module
        tied = tuple(re.escape(name) + "$" for name in module.all_tied_weights_keys)
        return (*(module._keys_to_ignore_on_load_unexpected or ()), *tied)

    def train_step(self, batch: Batch) -> StepStats:
        measures = StepMeasures.of_batch(batch, self._algorithm.config)
        self._memory.begin_step()

        def run() -> tuple[list[Pass], list[torch.Tensor]]:
            passes = self._model.passes.divide(batch)
            place = self._trainer.seed, self._stepper.steps, self.mesh.get_local_rank(DATA)
            model = self._model.module
            with resharded_at_end(model, self.mesh, self._trainer), with_dropout(model, self.lora, place):
                return passes, [
                    self._accumulate(one, batch.select(one.samples).to(self.device), measures)
                    for one in passes
                ]

        (passes, vectors), warnings = self._retry.step(self._model.passes, batch, run)
        counts = [[one.tokens, one.padding, one.row_tokens] for one in passes]
        sums, maxima = measures.split(measures.join(vectors, self.device))
        sums = torch.cat([sums, sums.new_tensor(counts).sum(0)])
        dist.all_reduce(sums, group=self.mesh.get_group(DATA))
        dist.all_reduce(maxima, dist.ReduceOp.MAX, self.mesh.get_group(DATA))
        vector = torch.cat([sums[:-3], maxima])
        norm, skipped = (
            self._stepper.step(measures.lr_scale(vector)) if measures.tokens else (0.0, NOTHING_TRAINED)
        )
        tokens, padding, row_tokens = (int(count) for count in sums[-3:])
        made = PassResult(vector, len(passes), tokens, padding, row_tokens)
        stats = made.counted_in(measures.stats(vector, grad_norm=norm, skipped=skipped))
        peak, expected = self._memory.peaks(self._retry.tokens)
        return msgspec.structs.replace(
            stats, memory_peak_gb=peak, memory_expected_gb=expected, warnings=warnings
        )

    def logprobs(self, batch: Batch) -> torch.Tensor:
        return self._evaluate(self._model, batch)

    def reference_logprobs(self, batch: Batch) -> torch.Tensor:
        if self._reference is None:
            raise RuntimeError("reference_logprobs before keep_reference: there is no reference model")
        with without_adapters(self._reference.module):
            return self._evaluate(self._reference, batch)

    def keep_reference(self) -> None:
        """Load the initial weights as the reference model, or use the base of the adapters.

        After a restart, call this method before `restore`: checkpoints do not contain the reference.
        """
        if self._reference is None and self.lora.rank:
            self._reference = self._model
        elif self._reference is None:
            self._reference = ShardedModel(self._directory, "model.path", self.mesh, self._trainer)
            self._models.append(self._reference)

    def load_frozen(self, spec: FrozenSpec) -> FrozenModel:
        model = load_frozen(spec, self.mesh, self._trainer)
        self._models.append(model)
        return frozen(model.module, token_evaluator(spec, partial(self._evaluate, model)))

    def last_states(self, batch: Batch) -> LastStates:
        return self._retry.run_optional(lambda: self._model.last_states(batch))

    @property
    def device(self) -> torch.device:
        return self._model.passes.device

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name() if self.device.type == "cuda" else ""

    @torch.no_grad()
    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield copies of the trained tensors on rank 0, in the training dtype.

        One parameter is gathered at a time.
        """
        yield from self._gathered(*self._published)

    @torch.no_grad()
    def export_model(self) -> Iterator[tuple[str, torch.Tensor]]:
        owners = assign_writers({view.name: math.prod(view.whole) for view in self._views}, self.mesh.size())
        halves = {half: owners[target.weight] for target in self.targets for half in (target.a, target.b)}
        adapter = dict(self._gathered(*self._published, halves)) if self.targets else {}
        targets = {target.weight: target for target in self.targets}
        for name, tensor in self._gathered(self._views, self._tensors, owners):
            yield name, merged(targets[name], tensor, adapter, self.lora) if name in targets else tensor

    @property
    def publication(self) -> Publication:
        if self._plan is None:
            return Publication.by_rank_0({view.name: view.whole for view in self._published[0]})
        return self._plan.publication()

    @torch.no_grad()
    def pieces(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._plan is None:
            yield from self.export()
            return
        own = (piece for _, piece in self._plan.published(self.mesh.get_rank()))
        for name, piece in self._plan.cut(self._published[1], self.mesh.get_local_rank(DATA), own):
            yield name, piece.to(self.device, DTYPES[self._trainer.dtype])

    def _modules(self) -> list[torch.nn.Module]:
        return [model.module for model in (self._model, self._reference) if model is not None]

    def close(self) -> None:
        self._reference = None
        super().close()
        self._destroy_group()

    def _destroy_group(self) -> None:
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()

    def _evaluate(self, model: ShardedModel | ShardedValues, batch: Batch) -> torch.Tensor:
        return self._retry.run_without_gradients(model.passes, batch, lambda: model.evaluate(batch))

    def _forget_passes(self) -> None:
        """Drop the state of interrupted passes."""
        for model in self._models:
            forget_pass(model.module)
        self._stepper.zero_grad()

    def _identity(self) -> dict[str, str]:
        lora = f"rank {self.lora.rank} scaling {self.lora.scaling:g}" if self.lora.rank else "none"
        return {"backend": "fsdp", "architecture": self.architecture, "lora": lora}

    def _accumulate(self, forward_pass: Pass, part: Batch, measures: StepMeasures) -> torch.Tensor:
        """Add one micro-batch's gradient to the shards' gradients; return its measurements."""
        tokens = trained_tokens(part)

        def backward(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
            loss, vector = micro_batch_loss(self._algorithm, measures, tokens, logprobs, entropy)
            loss.backward()
            return vector

        return self._model.run(forward_pass, part, tokens.place, backward)

    def _gathered(
        self,
        views: Sequence[TensorView],
        parameters: Mapping[str, torch.Tensor],
        owners: Mapping[str, int] = MappingProxyType({}),
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor on its owner, by default rank 0."""
        for name, group in groupby(views, key=lambda view: view.parameter):
            whole = gathered(parameters[name].to(self.device))
            own = [view for view in group if owners.get(view.name, 0) == self.mesh.get_rank()]
            if own:
                whole = whole.to(DTYPES[self._trainer.dtype])
                yield from ((view.name, view.within(whole)) for view in own)


def join_mesh(parallel: ParallelConfig, trainer: TrainerConfig) -> tuple[DeviceMesh, bool]:
    """Return the mesh of the ranks, and whether the backend must destroy their process group.

    Sets `trainer.attention_backend` for this process.
    """
    device, world = choose_device(trainer.device), check_world(parallel)
    if device.type == "cuda":
        device = own_gpu()
    choose_backend(trainer.attention_backend)
    owns = not dist.is_initialized() and join_ranks(device, world, trainer.process_group_timeout_s)
    sizes = parallel.data_parallel_size, parallel.tensor_model_parallel_size
    return init_device_mesh(device.type, sizes, mesh_dim_names=(DATA, TENSOR)), owns
