"""Makes the optimizer steps of parameters that have fp32 masters."""

from collections.abc import Collection, Mapping

import torch

from trainer.config import OptimizerConfig
from trainer.functional.learning_rate import learning_rate
from trainer.optimizers.registry import make_optimizer
from trainer.reference.shards import gathered


def masters_of(trained: Mapping[str, torch.nn.Parameter], *, apart: bool) -> dict[str, torch.nn.Parameter]:
    """Return the parameters themselves, or copies of them if the masters are to be apart."""
    return {name: torch.nn.Parameter(p.detach().clone()) if apart else p for name, p in trained.items()}


class MasterStepper:
    """The optimizer of a model. Weight decay leaves out vectors (norms and biases), as in Megatron-core."""

    def __init__(
        self,
        trained: Mapping[str, torch.nn.Parameter],
        masters: Mapping[str, torch.nn.Parameter],
        config: OptimizerConfig,
        embeddings: Collection[torch.Tensor],
    ) -> None:
        """Step `masters`; `trained` are copies of them in another dtype, or the same objects.

        `embeddings` are the masters that are the embedding or the last layer.
        """
        self._trained, self.masters, self._config = trained, masters, config
        self.optimizer = make_optimizer({name: self.stepped(name) for name in masters}, config, embeddings)
        self.steps = 0
        """Steps that were made; skipped ones do not count."""
        self.publishes = True
        """Whether a step copies the masters to the parameters; an engine may do so instead."""

    def stepped(self, name: str) -> torch.nn.Parameter:
        """Return the tensor of a master that the optimizer steps, by which it keeps its state."""
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
        """Clip and apply the gradient; returns its norm, and why it was not applied.

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
        """Scale the masters' gradients to a largest norm; returns the norm before that."""
        return float(gathered(torch.nn.utils.clip_grad_norm_(self.masters.values(), limit)))

    def _apply(self) -> None:
        """Step the masters by their gradients."""
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Drop the masters' gradients."""
        for master in self.masters.values():
            master.grad = None

    def loaded(self) -> None:
        """Take over masters that a checkpoint has filled."""
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the masters to the parameters, unless an engine does so between two of its steps."""
        for name, parameter in self._trained.items() if self.publishes else ():
            if parameter is not self.masters[name]:
                parameter.copy_(self.masters[name])

    def tensors(self) -> list[torch.Tensor]:
        """Return masters and moments, of those that are on the device."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*self.masters.values(), *(value for value in states if isinstance(value, torch.Tensor))]
