"""Repeats the steps of a run with the reference backend; compares loss, gradient and update.

The shadow trains the recorded groups from the published weights of the previous version, with its own
moments, in float32 on the CPU. The shadow must follow every step since its start.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import xxhash

from protocol.device.checkpoint_views import checkpoint_views, model_tensors
from services.runtime.training import build_models
from services.settings.sections import Settings
from trainer.backends.base import StepStats
from trainer.config import ParallelConfig
from trainer.execution.commands import DigestWeightsCommand, KeepReferenceCommand
from trainer.execution.executor import Executor
from trainer.reference.backend import ReferenceBackend
from trainer.step.plan import StepPlan
from trainer.step.train_command import TrainCommand

MAX_COMPARED_ELEMENTS = 1 << 22
"""Maximum number of elements in the compared tensors, except for the first tensor."""
DIFFERENCE_LIMITS = {"float32": 0.02, "bfloat16": 0.3, "float16": 0.1, "fp8": 0.8}
"""Coarser dtype of trainer (fp8: `trainer.fp8`) and engines -> allowed relative difference of loss, gradient
norm and update.

Rounding changes the sign of Adam's first update of an element whose gradient is close to 0."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Distance of a step's number or tensor from the shadow's."""

    name: str
    """Name: loss, gradient norm, or the updated tensor."""
    relative: float
    ratio: float
    """Size of the trainer's value, relative to the shadow's."""


class Shadow:
    """Backend that follows the trainer."""

    def __init__(self, settings: Settings) -> None:
        """Load the run's initial model.

        Raises:
            SettingsError: the reference backend cannot load the model, or cannot train it under these
                settings.
        """
        trainer = dataclasses.replace(
            settings.trainer, backend="reference", dtype="float32", fp8="off", device="cpu", threads=1
        )
        weights = dataclasses.replace(settings.weights, transport="disk")
        plain = dataclasses.replace(
            settings.together,
            trainer=trainer,
            parallel=ParallelConfig(),
            weights=weights,
            engine=dataclasses.replace(settings.engine, draft_lr=0.0),
        )
        self._executor = Executor(build_models(plain))
        if settings.algorithm.kl_coef > 0:
            self._executor.lead(KeepReferenceCommand())
        computed = settings.trainer.dtype if settings.trainer.fp8 == "off" else "fp8"
        self.limit = max(DIFFERENCE_LIMITS[computed], DIFFERENCE_LIMITS[settings.engine.dtype])
        """Allowed relative difference."""
        backend = self._executor.models.policy
        assert isinstance(backend, ReferenceBackend)
        views = {} if settings.lora.rank else checkpoint_views(backend.model, model_tensors(backend.model))
        self._views = views
        """Tensors that versions replace; empty for adapters, where the shadow continues from its own
        weights."""
        self._compared_names = _compared_names(self._views)
        self._has_dropout = settings.lora.dropout > 0
        """Whether dropout masks depend on the trainer's layout, so that repeated steps differ."""

    @torch.no_grad()
    def follow(
        self,
        command: TrainCommand,
        stats: StepStats,
        before: Mapping[str, torch.Tensor] | None,
        after: Mapping[str, torch.Tensor] | None,
    ) -> Iterator[Difference]:
        """Repeat a step, and yield the differences of the trainer's step.

        Args:
            command: command with the stored records.
            stats: measurements of the trainer.
            before: published tensors of the version before the step; None: the shadow continues from its own
                weights.
            after: published tensors of the version after the step; None: no update is compared.
        """
        if before is not None:
            for name, view in self._views.items():
                # a version is rounded, the trainer is not: keep values that round to the version's
                view.copy_(torch.where(view.to(before[name].dtype) == before[name], view, before[name]))
        starts = {name: self._views[name].clone() for name in self._compared_names if after is not None}
        with torch.enable_grad():
            plan, expected = self._executor.train(command)
        if stats.skipped or expected.skipped or self._has_dropout:
            return
        yield from _numbers(plan, stats, expected)
        for name, initial in starts.items():
            assert after is not None
            # both are rounded as versions are
            start, repeated = (
                initial.to(after[name].dtype).double(),
                self._views[name].to(after[name].dtype).double(),
            )
            published_update, shadow_update = after[name].double() - start, repeated - start
            size = float(shadow_update.norm())
            if size:
                yield Difference(
                    name,
                    float((published_update - shadow_update).norm()) / size,
                    float(published_update.norm()) / size,
                )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return copies of the shadow's own tensors; empty if adapters are trained."""
        return {name: view.detach().clone() for name, view in self._views.items()}

    def digest(self, dtype: str) -> int:
        """Return the digest of the shadow's weights as a version in a dtype."""
        return self._executor.lead(DigestWeightsCommand(dtype))

    def close(self) -> None:
        """Release the model."""
        self._executor.close()


def _numbers(plan: StepPlan, stats: StepStats, expected: StepStats) -> Iterator[Difference]:
    """Yield the differences of loss and gradient norm; the loss relative to the sum of its terms' sizes."""
    sizes = (plan.advantages * plan.weights).abs()
    tokens = torch.tensor([float(sample.sampled.sum()) for sample in plan.samples])
    scale = float((sizes * tokens).sum())
    if stats.loss is not None and expected.loss is not None and scale:
        relative = abs(stats.loss - expected.loss) / scale
        yield Difference("loss", relative, stats.loss / expected.loss if expected.loss else 1.0)
    if stats.grad_norm is not None and expected.grad_norm:
        ratio = stats.grad_norm / expected.grad_norm
        yield Difference("gradient norm", abs(ratio - 1), ratio)


def _compared_names(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return a fixed selection of tensor names with `MAX_COMPARED_ELEMENTS` elements in total."""
    remaining, names = MAX_COMPARED_ELEMENTS, list[str]()
    for name in sorted(tensors, key=lambda name: xxhash.xxh3_64_intdigest(name.encode())):
        if tensors[name].numel() <= remaining or not names:
            remaining -= tensors[name].numel()
            names.append(name)
    return names
