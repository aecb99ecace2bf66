"""Generates with the training model: a GPTModel with a paged KV cache, one step at a time.

megatron-core's static engine runs a batch to its end, with the same length for all rows. Here, each sequence
has its own length and pages. Requests start and end between two steps, and weights may change there.

Shapes: B sequences with one new token each; N sequences, S tokens of the longest; V vocabulary.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from megatron.core.models.gpt import GPTModel

from protocol.errors import SettingsError
from protocol.weights.lora import NO_ADAPTERS, LoraConfig, as_scaled
from trainer.config import ParallelConfig
from trainer.megatron import cpu, parallel
from trainer.megatron.convert.adapters import lora_rules
from trainer.megatron.convert.parts import Slices, slices_of
from trainer.megatron.convert.reshard import TensorPlan, narrow_rows, plan_of
from trainer.megatron.families.decoder import EMBEDDING, OUTPUT, OUTPUT_BIAS
from trainer.megatron.families.delta import check_generation
from trainer.megatron.families.numbers import Architecture
from trainer.megatron.families.reading import read_architecture
from trainer.megatron.families.stages import export_plan, stage_rules
from trainer.megatron.inference.attention import CachedCore, CachedLatentAttention, CachedSelfAttention
from trainer.megatron.inference.cache import PagedCache, page_bytes, pages_for
from trainer.megatron.inference.graphs import DecodeGraphs, decode_inputs
from trainer.megatron.inference.sequence_adapters import NamedTensors, SequenceAdapters
from trainer.megatron.layers import lora
from trainer.megatron.layers.experts.router import RouterRecorder
from trainer.megatron.layers.tensor_parallel import skip_gradients
from trainer.megatron.layout import Layout
from trainer.megatron.loading import load_checkpoint
from trainer.megatron.model import DTYPES, PackedModel, buffers_of, build_model, transformer_config

VOCABULARY = (EMBEDDING, OUTPUT, OUTPUT_BIAS)
"""Tensors that are padded to a multiple of the ranks."""
NONE_NAMED: NamedTensors = {}
"""No named adapters."""
INITIAL_DEVIATION = 0.02
"""Standard deviation of the random weights of a model without a checkpoint."""


class OutputRows:
    """Selection of the rows whose logits are computed. Logits of prompts and padding are skipped.

    Set `index` (int64 [T] into the flattened [S, B]) before a forward pass. The model then returns logits [1,
    T, V / P].
    """

    def __init__(self, model: GPTModel) -> None:
        self.index: torch.Tensor | None = None
        model.output_layer.register_forward_pre_hook(self._select)

    def _select(
        self, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...] | None:
        if self.index is None:
            return None
        hidden = inputs[0]
        return hidden.flatten(0, 1).index_select(0, self.index).unsqueeze(1), *inputs[1:]


class CachedModel(parallel.GroupMember):
    """Model for generation, or one tensor rank's shard of it. Not thread-safe.

    The process may have other users of megatron-core. All ranks call the same methods with the same arguments
    in the same order, and get the same logits.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        dtype: str,
        running: int,
        length: int,
        buffer_bytes: int = 0,
        records_experts: bool = False,
        adapters: LoraConfig = NO_ADAPTERS,
        named: NamedTensors = NONE_NAMED,
        ranks: int = 1,
    ) -> None:
        """Load a checkpoint; without safetensors in the directory, weights are random.

        Args:
            model_dir: directory with config.json and, for a checkpoint, safetensors.
            dtype: one of `DTYPES`.
            running: maximum number of concurrent sequences.
            length: tokens of the longest sequence.
            buffer_bytes: limit of this rank's KV cache; 0: space for `running` sequences of `length`.
            records_experts: whether to record the chosen experts for `experts_of_pass`.
            adapters: adapters that versions update, with the scaling in B; initially without effect.
            named: fixed adapters that sequences select by name; only without `adapters`.
            ranks: number of tensor ranks; above 1, torch.distributed must be initialized.

        Raises:
            SettingsError: the model or adapters are not supported, or the buffer is too small for `length`.
            RuntimeError: out of memory.
        """
        self.architecture = read_architecture(model_dir)
        self.pages = _pages(self.architecture, DTYPES[dtype].itemsize, length, running, buffer_bytes, ranks)
        """Number of pages of the KV cache, enough for at least one sequence of `length`."""
        parts = _ranks(self.architecture, ranks)
        self._layout = Layout.of(parts, self.architecture.layers)
        self._plan = {plan.name: plan for plan in _plans(self.architecture, self._layout, adapters)}
        self.shapes = {name: plan.shape for name, plan in self._plan.items()}
        cpu.install()
        position = parallel.initialize(parts, "auto", 0)
        self._device, self._place = position.device, position.place
        self.graphs = DecodeGraphs(self._step, running, length)
        self._windows = set(map(self.architecture.window_of, range(self.architecture.layers)))
        try:
            self._make(model_dir, position, DTYPES[dtype], adapters, named)
            self._recorder = RouterRecorder(self.module) if records_experts else None
            like = next(iter(self.base.values()))
            self.cache = PagedCache(self.pages, length, self.architecture, like, ranks)
        except BaseException:
            self.close()
            raise

    def _make(
        self,
        model_dir: Path,
        position: parallel.Position,
        dtype: torch.dtype,
        adapters: LoraConfig,
        named: NamedTensors,
    ) -> None:
        self.module = _build(self.architecture, position, dtype)
        self._rows = OutputRows(self.module)
        self.base: dict[str, torch.Tensor] = dict(self.module.named_parameters())
        self._fill(model_dir)
        self.parameters = self._add(adapters, position) if adapters.rank else self.base
        """Parameters that versions update; `base` are the model's parameters."""
        rules = stage_rules(self.architecture, self._layout, position.place.pp)
        self._named = SequenceAdapters(self.module, rules, position, named)

    def _fill(self, model_dir: Path) -> None:
        if any(model_dir.glob("*.safetensors")):
            load_checkpoint(model_dir, self.architecture, self.base, self._layout, self._place)
            return
        generator = torch.Generator(self._device).manual_seed(0)  # the same norms on all ranks
        for parameter in self.base.values():
            parameter.normal_(0, INITIAL_DEVIATION, generator=generator)

    def _add(self, adapters: LoraConfig, position: parallel.Position) -> dict[str, torch.Tensor]:
        """Add adapters to the layers; return their parameters."""
        rules = stage_rules(self.architecture, self._layout, position.place.pp)
        added = lora.attach(self.module, rules, as_scaled(adapters), position, 0)
        self.module.requires_grad_(False)
        return added

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy whole tensors of a version into the parameters, following the trainer's export plan."""
        for name, tensor in tensors:
            plan = self._plan[name]
            number = self._layout.number_of(self._place, expert=plan.expert)
            held, end = self.parameters[plan.parameter], 0
            for piece in plan.on_rank(number):
                rows = narrow_rows(held, plan.dim, piece.local_start, piece.length, piece.local_matrix)
                rows.copy_(narrow_rows(tensor, plan.dim, piece.start, piece.length, piece.matrix))
                end = piece.local_start + piece.length
            if name in VOCABULARY and end < len(held):
                held[end:].zero_()  # the padding of the last ranks

    def slices(self) -> Slices:
        """Return this rank's parts of a version's tensors, as views."""
        return slices_of(self._plan.values(), self.parameters, self._layout, self._place)

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the model's tensors other than parameters."""
        return buffers_of(self.module)

    @torch.no_grad()
    def prefill(
        self,
        sequences: Sequence[Sequence[int]],
        tables: Sequence[Sequence[int]],
        adapters: Sequence[str] = (),
    ) -> torch.Tensor:
        """Fill the cache with N sequences; return logits [N, V] after the last token of each.

        Args:
            sequences: token ids.
            tables: cleared pages of each sequence, enough for its tokens.
            adapters: name of each sequence's adapter, "" for none; empty: no sequence has an adapter.
        """
        self._named.choose(adapters)
        lengths = list(map(len, sequences))
        longest, count = max(lengths), len(sequences)
        tokens = torch.tensor(
            [[*sequence, *[0] * (longest - len(sequence))] for sequence in sequences], device=self._device
        )
        self.cache.begin_prefill(tables, lengths, self.module.rotaries)
        places = [(length - 1) * count + number for number, length in enumerate(lengths)]
        self._rows.index = torch.tensor(places, device=self._device)
        return self._logits(tokens, None)[0]

    @torch.no_grad()
    def decode(
        self,
        tokens: Sequence[int],
        lengths: Sequence[int],
        tables: Sequence[Sequence[int]],
        adapters: Sequence[str] = (),
    ) -> torch.Tensor:
        """Append a token to each of B sequences; return logits [B, V] after it.

        Args:
            tokens: new token of each sequence.
            lengths: number of cached tokens of each sequence.
            tables: pages of each sequence, cleared before first use, with space for the new token.
            adapters: names of adapters, as in `prefill`.
        """
        self._named.choose(adapters)
        inputs = decode_inputs(tokens, lengths, tables)
        if self.graphs.on and not self._named.is_on:
            return self.graphs.logits(inputs, self._device)
        return self._step(torch.tensor(inputs, device=self._device))

    def _step(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return logits [B, V] of `decode_inputs` on the device, without synchronizing host and device."""
        self.cache.begin_decode(inputs[:, 2:], inputs[:, 1], self.module.rotaries)
        self._rows.index = None
        return self._logits(inputs[:, :1], self.cache.biases(self._windows))[:, 0]

    def experts_of_pass(self, sequences: int) -> torch.Tensor | None:
        """Return the experts of the last pass, int64 [S, N, layers with experts, k] on the host.

        S is the number of tokens per sequence, 1 in a decode step; N is `sequences`. None if experts are not
        recorded.
        """
        return None if self._recorder is None else self._recorder.take().unflatten(0, (-1, sequences))

    def clear(self, pages: Sequence[int]) -> None:
        """Zero pages before their first use by a sequence, see `PagedCache.clear`."""
        self.cache.clear(pages)

    def close(self) -> None:
        """Drop the graphs, and leave the process groups. Idempotent."""
        self.graphs.drop()
        super().close()

    def _logits(self, tokens: torch.Tensor, biases: dict[int, torch.Tensor] | None) -> torch.Tensor:
        found: torch.Tensor = self.module(
            tokens, None, biases, inference_context=self.cache, runtime_gather_output=True
        )
        return found[..., : self.architecture.vocabulary]


def _ranks(architecture: Architecture, ranks: int) -> ParallelConfig:
    """Return a layout of tensor ranks, which also split the matrices of experts."""
    shares = ranks if architecture.experts.count else 1
    return ParallelConfig(tensor_model_parallel_size=ranks, expert_tensor_parallel_size=shares)


def _plans(architecture: Architecture, layout: Layout, adapters: LoraConfig) -> tuple[TensorPlan, ...]:
    """Return the plans of a version's tensors: of the model, or of its adapters."""
    if not adapters.rank:
        return export_plan(architecture, layout)
    return plan_of([(0, lora_rules(stage_rules(architecture, layout, 0), adapters))], layout)


def _build(architecture: Architecture, position: parallel.Position, dtype: torch.dtype) -> PackedModel:
    config = transformer_config(architecture, position, dtype)
    attention = CachedLatentAttention if architecture.latent else CachedSelfAttention
    model = build_model(architecture, config, position, attention=attention, core_attention=CachedCore)
    skip_gradients(model)
    return model.eval().requires_grad_(False)


def _pages(
    architecture: Architecture, itemsize: int, length: int, running: int, buffer_bytes: int, ranks: int
) -> int:
    """Return the number of pages of the KV cache."""
    check_generation(architecture.delta)
    longest, each = pages_for(length), page_bytes(architecture, itemsize, ranks)
    if 0 < buffer_bytes < longest * each:
        raise SettingsError(
            f"the KV cache of one sequence of {length} tokens takes {longest * each / 2**30:.3g} GiB, the "
            f"buffer has {buffer_bytes / 2**30:.3g}"
        )
    needed = running * longest
    return min(needed, buffer_bytes // each) if buffer_bytes else needed
