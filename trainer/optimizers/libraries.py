"""Creates the optimizers of libraries, and the user's. Arguments and errors as in `make_optimizer`.

Muon: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks". The learning rate is
AdamW's, multiplied by 0.2 sqrt(max(rows, columns)) for a matrix, as in "Muon is Scalable for LLM Training"
(arXiv 2502.16982).
"""

import importlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from protocol.errors import SettingsError
from protocol.user_code import call, import_attribute, located
from trainer.config import OptimizerConfig


class MuonWithAdamW(torch.optim.Optimizer):
    """Combination of two torch optimizers, with concatenated parameter groups and shared state."""

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW) -> None:
        """Combine optimizers with disjoint parameters, before either has taken a step."""
        groups: list[dict[str, Any]] = [*muon.param_groups, *adamw.param_groups]
        super().__init__(groups, {})
        self.param_groups = groups  # the same dict objects, so changes here affect the inner optimizers
        muon.state = adamw.state = self.state
        self._both: tuple[torch.optim.Optimizer, ...] = (muon, adamw)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for optimizer in self._both:
            optimizer.step()


def is_hidden_matrix(parameter: torch.Tensor, embeddings: Iterable[torch.Tensor]) -> bool:
    """Return whether Muon updates a parameter: a matrix other than the embedding and the output layer."""
    return parameter.ndim == 2 and all(parameter is not other for other in embeddings)


NEWTON_SCHULZ_STEPS = 5
"""Number of iterations that orthogonalize an update of Muon."""
PROBE_STEPS = 2
"""Number of probe steps: the first creates the optimizer's state, the second uses it."""
Masters = Mapping[str, torch.nn.Parameter]


def adamw(
    masters: Masters, config: OptimizerConfig, embeddings: Collection[torch.Tensor]
) -> torch.optim.Optimizer:
    """Return torch's AdamW."""
    return torch.optim.AdamW(_groups(list(masters.values()), config), **_adam_options(config))


def adamw_8bit(
    masters: Masters, config: OptimizerConfig, embeddings: Collection[torch.Tensor]
) -> torch.optim.Optimizer:
    """Return bitsandbytes' AdamW with 8-bit moments."""
    made: torch.optim.Optimizer = _eight_bit()(
        _groups(list(masters.values()), config), **_adam_options(config)
    )
    return made


def muon(
    masters: Masters, config: OptimizerConfig, embeddings: Collection[torch.Tensor]
) -> torch.optim.Optimizer:
    """Return Muon for the matrices of hidden layers, with AdamW for all other parameters."""
    for name, parameter in masters.items():
        if parameter.ndim > 2:
            raise SettingsError(
                f"setting optimizer.name: 'muon' steps matrices, and {name} has the shape "
                f"{tuple(parameter.shape)}; use adamw"
            )
    matrices = [p for p in masters.values() if is_hidden_matrix(p, embeddings)]
    hidden = {id(p) for p in matrices}
    others = [p for p in masters.values() if id(p) not in hidden]
    stepper = torch.optim.Muon(
        matrices,
        lr=config.lr,
        weight_decay=config.weight_decay,
        momentum=config.muon_momentum,
        ns_steps=NEWTON_SCHULZ_STEPS,
        adjust_lr_fn="match_rms_adamw",
    )
    return MuonWithAdamW(stepper, torch.optim.AdamW(_groups(others, config), **_adam_options(config)))


def own(
    masters: Masters, config: OptimizerConfig, embeddings: Collection[torch.Tensor]
) -> torch.optim.Optimizer:
    """Return the optimizer that the user's `MODULE:NAME` creates."""
    found, file = import_attribute(config.name, "setting optimizer.name")
    what = f"setting optimizer.name: {config.name} in {file}"
    given, options = _groups(list(masters.values()), config), {"lr": config.lr, **config.options}
    made = call(what, found, "groups of parameters, lr and optimizer.options", (given,), options)
    if not isinstance(made, torch.optim.Optimizer):
        raise SettingsError(f"{what} made a {type(made).__name__}, which is not a torch.optim.Optimizer")
    return made


def probe_optimizer(config: OptimizerConfig) -> None:
    """Run steps of a user's optimizer on a matrix and a vector.

    Raises:
        SettingsError: the optimizer cannot be created, raises, does not change the matrix, or produces values
            that are not finite.
    """
    masters = {"matrix": torch.nn.Parameter(torch.eye(4)), "vector": torch.nn.Parameter(torch.ones(4))}
    optimizer = own(masters, config, ())
    what = f"setting optimizer.name: {config.name}"
    for step in range(PROBE_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = config.lr or 1.0
        for parameter in masters.values():
            parameter.grad = torch.full_like(parameter, 0.5 + step)
        try:
            optimizer.step()
        except Exception as error:  # the user's code may raise anything
            raise SettingsError(f"{what} raised in step {step} at {located(error)}") from error
    if torch.equal(masters["matrix"].detach(), torch.eye(4)):
        raise SettingsError(f"{what} changed nothing in {PROBE_STEPS} steps")
    for name, parameter in masters.items():
        if not torch.isfinite(parameter).all():
            raise SettingsError(f"{what} made the {name} {parameter.detach().flatten().tolist()}")


def _groups(parameters: Collection[torch.nn.Parameter], config: OptimizerConfig) -> list[dict[str, Any]]:
    matrices = [p for p in parameters if p.ndim > 1]
    vectors = [p for p in parameters if p.ndim <= 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _adam_options(config: OptimizerConfig) -> dict[str, Any]:
    return {"lr": config.lr, "betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps}


def _eight_bit() -> Any:
    try:
        return importlib.import_module("bitsandbytes.optim").AdamW8bit
    except ImportError as error:
        raise SettingsError(
            f"setting optimizer.name: 'adamw_8bit' needs bitsandbytes, which cannot be imported ({error}); "
            "install tether-rl[bitsandbytes], or use adamw"
        ) from error
