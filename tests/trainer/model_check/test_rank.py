"""Tests what a comparison finds: the first difference, with its place and both values."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trainer.megatron.loading import SafetensorsReader
from trainer.model_check import rank
from trainer.model_check.expected import batch_of
from trainer.model_check.rank import TensorFindings, compare_logprobs, compare_tensors

TENSORS = {"a": torch.arange(12.0).view(4, 3).bfloat16(), "b": torch.arange(3.0), "kept": torch.zeros(1)}


def compared(directory: Path, exported: dict[str, torch.Tensor]) -> TensorFindings:
    save_file(TENSORS, directory / "model.safetensors")
    with SafetensorsReader(directory) as reader:
        return compare_tensors(exported.items(), reader, lambda name: name == "kept")


def test_compare_tensors_says_what_was_compared_and_what_was_not(tmp_path: Path) -> None:
    found = compared(tmp_path, {"b": TENSORS["b"], "a": TENSORS["a"].float()})
    assert found == TensorFindings(2, ["bfloat16", "float32"], ["kept"], "")


def test_compare_tensors_names_the_first_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "BLOCK_ELEMENTS", 6)  # two rows
    wrong = TENSORS["a"].float()
    wrong[3, 1] += 1
    found = compared(tmp_path, {"a": wrong, "b": TENSORS["b"][:2]})
    assert found.difference == "a at [3, 1]: exported 11.0, in the checkpoint 10.0"


def test_compare_tensors_distinguishes_bits_of_equal_values(tmp_path: Path) -> None:
    wrong = TENSORS["b"].clone()
    wrong[0] = -0.0
    found = compared(tmp_path, {"a": TENSORS["a"].float(), "b": wrong})
    assert found.difference == "b at [0]: exported -0.0, in the checkpoint 0.0"


@pytest.mark.parametrize(
    ("exported", "difference"),
    [
        ({"a": torch.zeros(2, 3)}, "a is exported in shape (2, 3), the checkpoint's is (4, 3)"),
        ({"c": torch.zeros(1)}, "c is exported twice, or is not in the checkpoint"),
        ({"b": TENSORS["b"]}, "a of the checkpoint is not exported"),
    ],
)
def test_compare_tensors_names_a_tensor_that_does_not_belong(
    tmp_path: Path, exported: dict[str, torch.Tensor], difference: str
) -> None:
    assert compared(tmp_path, exported).difference == difference


def test_compare_tensors_exhausts_an_export_that_differs(tmp_path: Path) -> None:
    """Other ranks take part in it."""
    taken = []

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("c", "b"):
            taken.append(name)
            yield name, torch.zeros(1)

    save_file(TENSORS, tmp_path / "model.safetensors")
    with SafetensorsReader(tmp_path) as reader:
        assert compare_tensors(export(), reader, lambda name: False).difference
    assert taken == ["c", "b"]


def test_compare_logprobs_names_the_tokens_of_the_first_difference() -> None:
    batch = batch_of(torch.arange(20), torch.tensor([5, 15]))
    expected = -torch.ones(20)
    close = expected + 5e-5
    assert compare_logprobs(batch, close, expected).difference == ""
    assert compare_logprobs(batch, close, expected).compared == 18
    wrong = close.clone()
    wrong[[5, 15, 19]] = torch.tensor([9.0, -1.25, float("nan")])  # 5 begins a sample: it is given
    found = compare_logprobs(batch, wrong, expected)
    assert found.difference == (
        "sample 1, token 10: after ... [7, 8, 9, 10, 11, 12, 13, 14] token 15 has log-probability -1.25, "
        "by Hugging Face -1; so 2 of 18 tokens differ"
    )
