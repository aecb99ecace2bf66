"""Holds a transformers model with a value head, and computes values with it."""

from pathlib import Path

import torch
from safetensors import safe_open

from protocol.errors import SettingsError
from trainer.batch import Batch
from trainer.reference.frozen import load_model
from trainer.reference.logprobs import padded

HEAD = ("score.weight", "score.bias")
"""Names of the value head's tensors in a Hugging Face checkpoint."""


class ValueModel(torch.nn.Module):
    """Transformers model without output layer, and a linear layer from hidden states to values."""

    def __init__(self, model_dir: Path, setting: str, *, blank: bool = False) -> None:
        """Load model and head; a head missing in the checkpoint is zero. Arguments as in `load_model`.

        Raises:
            SettingsError: transformers cannot load the directory, or its head has several labels.
        """
        super().__init__()
        self.model = load_model(model_dir, setting, with_head=False, blank=blank)
        hidden = self.model.get_input_embeddings().weight.shape[1]
        self.score = torch.nn.Linear(hidden, 1)
        head = read_head(model_dir, setting, hidden)
        with torch.no_grad():
            for name in HEAD:
                self.get_parameter(name).zero_()
                if name in head:
                    self.get_parameter(name).copy_(head[name])

    def forward(self, arguments: dict[str, torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        """Return the values at some inputs of the model.

        Args:
            arguments: keyword arguments of the model's call.
            rows: int64 [k]: indices into the flattened inputs.

        Returns:
            float32 [k].
        """
        hidden = self.model(**arguments, use_cache=False).last_hidden_state.flatten(0, 1)[rows]
        weight, bias = self.score.weight.float(), self.score.bias.float()
        return torch.nn.functional.linear(hidden.float(), weight, bias)[:, 0]


def read_head(model_dir: Path, setting: str, hidden: int) -> dict[str, torch.Tensor]:
    """Return a checkpoint's value head tensors by name. `setting` is the setting with the directory.

    Raises:
        SettingsError: the head has several labels.
    """
    head: dict[str, torch.Tensor] = {}
    for path in sorted(model_dir.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            head |= {name: file.get_tensor(name) for name in HEAD if name in file.keys()}  # noqa: SIM118 (not a mapping)
    for name, shape in zip(HEAD, ((1, hidden), (1,)), strict=True):
        if name in head and tuple(head[name].shape) != shape:
            raise SettingsError(
                f"{setting} {name} in {model_dir} has shape {tuple(head[name].shape)}, and a value head "
                f"has one label, {shape}"
            )
    return head


def values_at(model: ValueModel, part: Batch, place: torch.Tensor) -> torch.Tensor:
    """Return the values of the states from which tokens of a micro-batch were sampled, [k].

    Args:
        model: model on the micro-batch's device.
        part: the micro-batch.
        place: int64 [k]: indices of the tokens.
    """
    ids, sample, position = padded(part)
    rows = sample * ids.size(1) + position - 1
    values: torch.Tensor = model({"input_ids": ids}, rows[place])
    return values
