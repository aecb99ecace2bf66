"""Checks the experts that an engine recorded, before routers choose them again (arXiv 2510.11370)."""

import torch

from protocol.errors import TetherError
from trainer.megatron.architecture.experts import Experts


def check_recorded(recorded: torch.Tensor | None, experts: Experts, layers: int) -> None:
    """Check that recorded experts are those of a model.

    Args:
        recorded: [t, L, K], see `Batch.experts`.
        experts: the model's.
        layers: of the model.

    Raises:
        TetherError: there are none, or they are of another model; says of what they are.
    """
    if recorded is None:
        raise TetherError(
            "setting trainer.routing_replay: no engine recorded which experts it chose; groups that were "
            "generated before it was set cannot be trained with it"
        )
    sparse, found = experts.sparse_layers_before(layers), tuple(recorded.shape[1:])
    largest = int(recorded.max()) if len(recorded) else -1
    if found != (sparse, experts.per_token) or largest >= experts.count:
        raise TetherError(
            f"the engine recorded {found[1]} experts of each of {found[0]} layers, up to number {largest}; "
            f"the trainer's model has {experts.per_token} of {experts.count} in each of {sparse}: they have "
            "different models"
        )
