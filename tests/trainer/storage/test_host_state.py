"""Tests that copies of a state are of the moment at which they were made, and are written whole."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from trainer.storage.host_state import HostCopies, HostState


def test_copies_are_contiguous_and_do_not_follow_the_tensors() -> None:
    whole = torch.arange(6.0).view(2, 3)
    source = {"transposed": whole.t(), "row": whole[0], "scalar": torch.tensor(7), "empty": torch.empty(0, 3)}
    expected = {name: tensor.clone() for name, tensor in source.items()}
    copies = HostCopies().copy_all(source.items())
    whole.zero_()
    assert list(copies) == list(expected)
    for name, copy in copies.items():
        assert copy.is_contiguous()
        assert torch.equal(copy, expected[name])


def test_state_is_written_as_it_is(tmp_path: Path) -> None:
    state = HostState({"a": {"x": torch.ones(2)}, "b": {"y": torch.zeros(1)}}, texts={"layout.json": "{}"})
    state.write(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "layout.json"]
    assert torch.equal(load_file(tmp_path / "a")["x"], torch.ones(2))


def test_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError, match=str(tmp_path / "a")):
        HostState({"a": {"x": torch.ones(2)}}).write(tmp_path)
