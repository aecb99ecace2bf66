"""Trains with megatron-core."""

import trainer.megatron.cpu  # noqa: F401 (before megatron-core)

# isort: split
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch

from protocol.errors import SettingsError
from protocol.weights.lora import NO_ADAPTERS, LoraConfig, adapter_targets
from protocol.weights.peft import check_peft
from trainer.algorithms.base import Algorithm
from trainer.backends.base import Backend, FrozenModel, FrozenSpec, Replicas, StepStats, reference_is_copy
from trainer.backends.early_export import EarlyExport, Tensors
from trainer.backends.engine_attach import check_model_buffers, check_parameters, take_parameters
from trainer.backends.host_offload import HostOffload, Offloadable
from trainer.batch import Batch
from trainer.config import OptimizerConfig, ParallelConfig, TrainerConfig
from trainer.layers.attention.kernels import choose_backend
from trainer.lora import merged, with_dropout, without_adapters
from trainer.megatron import cpu, parallel
from trainer.megatron.checkpoint.state import copy_part, restore_part
from trainer.megatron.convert.adapters import lora_rules
from trainer.megatron.convert.export import Exporter
from trainer.megatron.convert.parts import parameters_in, slices_of
from trainer.megatron.convert.reshard import plan_of
from trainer.megatron.families.experts import check_ranks
from trainer.megatron.families.reading import read_architecture, read_critic
from trainer.megatron.families.stages import export_plan, stage_rules
from trainer.megatron.forward import Runner
from trainer.megatron.layers import lora
from trainer.megatron.layers.experts.balance import extremes
from trainer.megatron.layout import Layout
from trainer.megatron.memory.expected import Workload
from trainer.megatron.model import DTYPES, PackedModel, buffers_of, whole_part
from trainer.megatron.optimizer_step import retry_of
from trainer.megatron.part import ModelPart
from trainer.megatron.roles.frozen import load_part, shapes_of
from trainer.memory.expected import FIRST_TOKENS
from trainer.memory.plan import MemoryPlan
from trainer.ranks.publication import Publication, assign_writers
from trainer.step.loss import micro_batch_loss
from trainer.step.measures import PassResult, StepMeasures
from trainer.storage.host_state import HostCopies, HostState


class MegatronBackend(parallel.GroupMember, Offloadable, Backend):
    """Trainer of a Hugging Face checkpoint with tensor, pipeline, context and data parallelism.

    Results do not depend on the layout. Without torchrun, the world has one rank. Without CUDA, ranks
    communicate through gloo.
    """

    _reference: Runner | None = None
    _reference_model: torch.nn.Module | None = None

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

        With `shared`, masters are separate from the parameters in every dtype, and are the published tensors.
        `attach` may follow.

        Raises:
            SettingsError: the model is not supported, or does not fit the layout.
        """
        self.algorithm, self._trainer = algorithm, trainer
        self._model_spec = read_architecture(model_dir)
        self.architecture = self._model_spec.name
        check_ranks(self._model_spec.experts, parallel)
        self._plan = export_plan(self._model_spec, Layout.of(parallel, self._model_spec.layers))
        self.position = initialize(parallel, trainer)
        self.replicas = self.position.replicas()
        try:
            self._memory = self._plan_memory(optimizer, adapters, shared, frozen, critic_dir, served)
            self._part = ModelPart(self._model_spec, self.position, trainer)
            chunks = self._part.build()
            self._parameters = self._part.load(model_dir, chunks)
            self._trained, self._published = self._parameters, self._plan
            if adapters.rank:
                self._add_adapters(whole_part(chunks), adapters)
            self._buffers, self._rotaries = buffers_of(chunks[0]), chunks[0].rotaries
            self._exporter = Exporter(
                self._part.layout,
                self.position,
                torch.float32 if shared else DTYPES[trainer.dtype],
                self._parameter,
            )
            self._make_stepper(chunks, optimizer, separate_masters=shared)
        except BaseException:
            self.close()
            raise
        self._host, self._copies = HostOffload(self.position.device), HostCopies()

    def costs(self, lengths: torch.Tensor) -> torch.Tensor:
        return self._model_spec.layer_flops(lengths.double())

    def train_step(self, batch: Batch) -> StepStats:
        measures = StepMeasures.of_batch(batch, self.algorithm.config)
        self._memory.begin_step()
        step = self._stepper.step(
            batch,
            lambda: self._train(batch, measures),
            lr_scale=measures.lr_scale if measures.tokens else None,
        )
        if not step.skipped:
            self._runner.update_biases(self._trainer.moe_router_bias_update_rate)
        busiest, idlest = extremes(self._runner.loads)
        peak, expected = self._memory.peaks(self._passes.tokens)
        return msgspec.structs.replace(
            step.passes.counted_in(
                measures.stats(step.passes.vector, grad_norm=step.norm, skipped=step.skipped)
            ),
            loss_scale=step.loss_scale,
            loss_scale_repeats=step.loss_scale_repeats,
            memory_peak_gb=peak,
            memory_expected_gb=expected,
            expert_load_max=busiest,
            expert_load_min=idlest,
            warnings=step.warnings,
        )

    def _train(self, batch: Batch, measures: StepMeasures) -> PassResult:
        """Run the passes of an update.

        Tensor ranks draw the same dropout masks, all other ranks different ones.
        """
        rank = self.position.copy + self.position.copies * self.position.place.pp
        place = self._trainer.seed, self._optimizer.steps, rank
        with with_dropout(torch.nn.ModuleList(self._runner.chunks), self.lora, place):
            return self._runner.train(batch, partial(micro_batch_loss, self.algorithm, measures), measures)

    @property
    def tokens(self) -> int:
        """Planned number of tokens per micro-batch on the device."""
        return self._memory.tokens

    @property
    def shares_prefixes(self) -> bool:
        return self._runner.shares_prefixes

    @property
    def device_name(self) -> str:
        device = self.position.device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else ""

    def flops(self, lengths: torch.Tensor, shared: torch.Tensor, trained: int) -> float:
        spec, frozen = self._model_spec, bool(self.lora.rank)
        whole, once = (spec.layer_flops(each.double(), frozen=frozen).sum() for each in (lengths, shared))
        return float(whole - once) + spec.head_flops(trained, frozen=frozen)

    def logprobs(self, batch: Batch) -> torch.Tensor:
        return self._logprobs(self._runner, batch)

    def reference_logprobs(self, batch: Batch) -> torch.Tensor:
        if (runner := self._reference) is None:
            raise RuntimeError("reference_logprobs before keep_reference: there is no reference model")
        with without_adapters(torch.nn.ModuleList(self._runner.chunks)):
            return self._logprobs(runner, batch)

    def _logprobs(self, runner: Runner, batch: Batch) -> torch.Tensor:
        return self._passes.run_without_gradients(runner, batch, lambda: runner.evaluate(batch))

    def keep_reference(self) -> None:
        """Keep a copy of the current weights as the reference model, or use the base model of the adapters.

        After a restart, call before `restore`: checkpoints do not contain the reference model.
        """
        if self.lora.rank:
            self._reference = self._part.runner(self._runner.chunks)
            return
        chunks = self._part.build()
        self._reference_model = whole_part(chunks).requires_grad_(False)
        with torch.no_grad():
            for name, parameter in self._reference_model.named_parameters():
                parameter.copy_(self._parameters[name])
        self._reference = self._part.runner(chunks)

    def load_frozen(self, spec: FrozenSpec) -> FrozenModel:
        return load_part(spec, self.position, self._trainer, self._passes)

    @property
    def device(self) -> torch.device:
        return self.position.device

    def masters(self) -> Mapping[str, torch.Tensor]:
        return self._masters or super().masters()

    def master_parts(self) -> Mapping[str, torch.Tensor]:
        slices = slices_of(self._plan, self.masters(), self._part.layout, self.position.place)
        return {name: part for name, (_, part) in slices.items()}

    def attach(self, parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> None:
        # with adapters, these are the base model's parameters, which are constant and have no masters
        masters = self._parameters if self.lora.rank else self.masters()
        if self._parameters.keys().isdisjoint(parameters):  # engines with other layers use checkpoint names
            layout, place = self._part.layout, self.position.place
            parameters = parameters_in(self._plan, self._parameters, parameters, layout, place)
        check_parameters(self._parameters, masters, parameters)
        used = sorted({self._model_spec.rope_of(layer) for layer in range(self._model_spec.layers)})
        check_model_buffers(self._buffers, buffers, [self._rotaries[number].halves for number in used])
        if not self.lora.rank:
            self._optimizer.stop_filling_parameters()
        take_parameters(self._parameters, parameters)

    @torch.no_grad()
    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield copies of the trained tensors on rank 0, in the training dtype, on the training device.

        Tensors are gathered one at a time. With transport `shared`, yield the fp32 masters instead; on a
        single rank, dense masters are yielded as views.
        """
        if not self._masters or self._part.layout.ranks > 1:
            yield from self._exporter.gathered(self._published)
        else:
            parts = self.master_parts()
            yield from ((plan.name, parts[plan.name].reshape(plan.shape)) for plan in self._plan)

    @torch.no_grad()
    def export_model(self) -> Iterator[tuple[str, torch.Tensor]]:
        owners = assign_writers(
            {plan.name: math.prod(plan.shape) for plan in self._plan}, self._part.layout.ranks
        )
        halves = {half: owners[target.weight] for target in self.targets for half in (target.a, target.b)}
        adapter = dict(self._exporter.gathered(self._published, halves)) if self.targets else {}
        targets = {target.weight: target for target in self.targets}
        for name, tensor in self._exporter.gathered(self._plan, owners):
            if name in targets:
                tensor = merged(targets[name], tensor, adapter, self.lora)
            yield name, tensor.to(DTYPES[self._trainer.dtype]) if self._masters else tensor

    def export_ahead(self, begin: Callable[[Tensors], None] | None, updates: int) -> EarlyExport:
        begin = None if self.lora.rank else begin  # adapters are small
        self._optimizer.early = self._exporter.early_export(self._published, begin, updates)
        return self._optimizer.early

    @property
    def publication(self) -> Publication:
        return self._exporter.publication(self._published)

    @torch.no_grad()
    def pieces(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._exporter.pieces(self._published) if self._part.layout.ranks > 1 else self.export()

    def copy_state(self) -> HostState:
        model = self._part.description(self.lora)
        return copy_part(self._copies, self._trained, self._optimizer, model, self.position.rank)

    def restore(self, directory: Path) -> None:
        # Parameters with separate masters may belong to an engine.
        model, fill = self._part.description(self.lora), not self._masters
        restore_part(directory, self._trained, self._optimizer, model, self.position.rank, fill=fill)
        self._optimizer.fill_parameters()

    def _offloadable_tensors(self) -> tuple[Iterable[torch.Tensor], Iterable[torch.Tensor]]:
        if self._masters:
            raise SettingsError(
                "setting weights.transport: with 'shared' the trainer's state stays where the engine reads it"
            )
        stepped, blank = self._stepper.held()
        kept: list[torch.Tensor] = [*self._parameters.values(), *self._trained.values(), *stepped]
        if self._reference_model is not None:
            kept += self._reference_model.parameters()
        return kept, blank

    def _plan_memory(
        self,
        config: OptimizerConfig,
        adapters: LoraConfig,
        shared: bool,
        frozen: Sequence[FrozenSpec],
        critic_dir: Path | None,
        served: int,
    ) -> MemoryPlan:
        work = Workload(
            architecture=self._model_spec,
            parallel=self.position.config,
            trainer=self._trainer,
            optimizer=config,
            adapters=adapters,
            reference=reference_is_copy(self.algorithm.config, adapters, frozen),
            frozen=shapes_of(frozen),
            shared=shared,
            critic=read_critic(critic_dir) if critic_dir else None,
        )
        return MemoryPlan(work, self.position.device, served)

    def _make_stepper(
        self, chunks: list[PackedModel], optimizer: OptimizerConfig, *, separate_masters: bool
    ) -> None:
        """Create the runner and optimizer of the loaded chunks, by `ModelPart.stepper`."""
        self._stepper = self._part.stepper(
            chunks,
            optimizer,
            tokens=self._memory.tokens,
            separate_masters=separate_masters,
            replays_routing=self._trainer.routing_replay,
        )
        self._runner, self._optimizer = self._stepper.runner, self._stepper.optimizer
        self._passes, self._masters = self._stepper.passes, self._optimizer.masters

    def _add_adapters(self, part: torch.nn.Module, adapters: LoraConfig) -> None:
        """Train adapters instead of the model."""
        layout = self._part.layout
        stages = [stage_rules(self._model_spec, layout, stage) for stage in range(layout.pp)]
        self.lora = adapters
        self.targets = adapter_targets({plan.name: plan.shape for plan in self._plan}, adapters)
        check_peft(self.targets, adapters)
        self._published = plan_of(
            ((stage, lora_rules(rules, adapters)) for stage, rules in enumerate(stages)), layout
        )
        self._trained = lora.attach(
            part, stages[self.position.place.pp], adapters, self.position, self._trainer.seed
        )

    def _parameter(self, name: str) -> torch.Tensor:
        held = self._masters or self._trained
        return held[name] if name in held else self._parameters[name]


def initialize(config: ParallelConfig, trainer: TrainerConfig) -> parallel.Position:
    """Prepare torch for megatron-core and join the process groups as `parallel.initialize` does."""
    if trainer.threads > 0:
        torch.set_num_threads(trainer.threads)
    cpu.install()
    choose_backend(trainer.attention_backend)
    return parallel.initialize(config, trainer.device, trainer.seed, trainer.process_group_timeout_s)


def load_remote_frozen(
    spec: FrozenSpec, parallel: ParallelConfig, trainer: TrainerConfig
) -> tuple[FrozenModel, Replicas]:
    """Load a model that is never trained; as `trainer.registry.make_remote_frozen`. A collective.

    Raises:
        SettingsError: the model is not supported, or does not fit the layout. The message names the setting.
    """
    position = initialize(parallel, trainer)
    tokens = trainer.micro_batch_tokens or FIRST_TOKENS[position.device.type]
    passes = retry_of(position, tokens, lambda: None)
    return load_part(spec, position, trainer, passes), position.replicas()
