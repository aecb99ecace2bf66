"""Runs the optimizer steps of parameters with fp32 masters."""

from collections.abc import Collection, Mapping

import torch

from trainer.config import OptimizerConfig
from trainer.functional.learning_rate import learning_rate
from trainer.optimizers.registry import make_optimizer
from trainer.reference.shards import gathered


def masters_of(
    trained: Mapping[str, torch.nn.Parameter], *, separate_masters: bool
) -> dict[str, torch.nn.Parameter]:
    """Return copies of the parameters if `separate_masters`, else the parameters themselves."""
    return {
        name: torch.nn.Parameter(p.detach().clone()) if separate_masters else p for name, p in trained.items()
    }


class MasterStepper:
    """Optimizer of a model. Vectors (norms and biases) have no weight decay, as in Megatron-core."""

    def __init__(
        self,
        trained: Mapping[str, torch.nn.Parameter],
        masters: Mapping[str, torch.nn.Parameter],
        config: OptimizerConfig,
        embeddings: Collection[torch.Tensor],
    ) -> None:
        """Optimize `masters`. `trained` are the same objects, or copies of the masters in another dtype.

        `embeddings` are the masters of the embedding and the output layer.
        """
        self._trained, self.masters, self._config = trained, masters, config
        self.optimizer = make_optimizer({name: self.stepped(name) for name in masters}, config, embeddings)
        self.steps = 0
        """Number of completed steps, without skipped ones."""
        self.publishes = True
        """Whether a step copies the masters to the parameters; otherwise, an engine does."""

    def stepped(self, name: str) -> torch.nn.Parameter:
        """Return the tensor that the optimizer updates for a master, the key of its optimizer state."""
        return self.masters[name]

    def collect(self) -> None:
        """Add the parameters' gradients to the masters' gradients."""
        for name, parameter in self._trained.items():
            master = self.masters[name]
            if master is not parameter and parameter.grad is not None:
                grad = parameter.grad.float()
                master.grad = grad if master.grad is None else master.grad.add_(grad)
                parameter.grad = None

    def step(self, lr_scale: float = 1.0) -> tuple[float, str]:
        """Clip and apply the gradient; return its norm, and the reason if it was not applied.

        `lr_scale` is a factor of the learning rate.
        """
        norm = self._clip(self._config.clip_grad if self._config.clip_grad > 0 else float("inf"))
        finite = torch.isfinite(torch.tensor(norm)).item()
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(self._config, self.steps) * lr_scale
            self._apply()
            self.steps += 1
            self.publish()
        self.zero_grad()
        return norm, "" if finite else f"the gradient's norm is {norm}"

    def _clip(self, limit: float) -> float:
        """Clip the norm of the masters' gradients to `limit`; return the norm before clipping."""
        return float(gathered(torch.nn.utils.clip_grad_norm_(self.masters.values(), limit)))

    def _apply(self) -> None:
        """Update the masters with their gradients."""
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Drop the masters' gradients."""
        for master in self.masters.values():
            master.grad = None

    def loaded(self) -> None:
        """Handle masters that were loaded from a checkpoint."""
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the masters to the parameters, unless an engine does."""
        for name, parameter in self._trained.items() if self.publishes else ():
            if parameter is not self.masters[name]:
                parameter.copy_(self.masters[name])

    def tensors(self) -> list[torch.Tensor]:
        """Return the masters and moments that are on the device."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*self.masters.values(), *(value for value in states if isinstance(value, torch.Tensor))]
