"""Finds adapters that a model cannot have, or that training cannot start from; reads headers of files."""

from collections.abc import Iterator

from protocol.errors import SettingsError
from protocol.weights.lora import adapter_targets
from protocol.weights.peft import check_peft
from services.preflight.model import ModelFacts, tensor_shapes
from services.preflight.problem import Problem
from services.settings.sections import Settings


def adapter_problems(settings: Settings, model: ModelFacts) -> Iterator[Problem]:
    """Yield what keeps `[lora]` from the model."""
    lora = settings.lora
    if lora.path and not lora.rank:
        cause, remedy = "it is the adapter that training starts from, and lora.rank is 0", "set lora.rank"
        yield Problem(cause, remedy, "lora.path", lora.path)
    shapes = tensor_shapes(model.place) if lora.rank and model.is_made else {}
    if not shapes:  # made at the start, or refused without weights
        return
    try:
        check_peft(adapter_targets(shapes, lora), lora)
    except SettingsError as error:
        yield Problem(str(error))
