"""Copying an export into buckets: layout, digests, and what is refused."""

import pytest
import torch

from protocol.errors import WeightError
from protocol.weights.digests import digest
from trainer.weights.bucket_writer import fill_buckets, in_dtype


def test_fill_buckets_copies_and_digests_tensors_in_place() -> None:
    memory: list[torch.Tensor] = []

    def allocate(index: int, size: int) -> torch.Tensor:
        assert index == len(memory)
        memory.append(torch.zeros(size, dtype=torch.uint8))
        return memory[-1]

    columns = torch.arange(6, dtype=torch.bfloat16).view(2, 3).T
    reserved: list[tuple[int, int, int]] = []
    entries, buckets = fill_buckets(
        [("a", columns), ("b", torch.tensor(True)), ("c", torch.zeros(0, 4)), ("d", torch.ones(100))],
        128,
        allocate,
        lambda *part: reserved.append(part),
    )
    assert buckets == (128, 400)
    assert [(e.name, e.dtype, e.shape, e.bucket, e.offset, e.nbytes) for e in entries] == [
        ("a", "bfloat16", (3, 2), 0, 0, 12),
        ("b", "bool", (), 0, 64, 1),
        ("c", "float32", (0, 4), 0, 128, 0),
        ("d", "float32", (100,), 1, 0, 400),
    ]
    assert reserved == [(0, 0, 12), (0, 64, 1), (1, 0, 400)]
    raw = columns.contiguous().view(torch.uint8).numpy().tobytes()
    assert memory[0][:12].numpy().tobytes() == raw
    assert entries[0].digest == digest(raw)


def test_fill_buckets_refuses_what_cannot_be_published() -> None:
    def allocate(index: int, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    one = torch.zeros(1)
    for tensors, text in (
        ([("a", one), ("a", one)], "tensor a is duplicated"),
        ([("a", one.to(torch.complex64))], "tensor a: dtype 'complex64' cannot be sent"),
        ([], "without tensors"),
    ):
        with pytest.raises(WeightError, match=text):
            fill_buckets(tensors, 64, allocate)


def test_in_dtype_converts_floating_point_only() -> None:
    masters = [
        ("w", torch.tensor([1.0, 1.001953125])),
        ("mask", torch.tensor([True])),
        ("step", torch.tensor(3)),
    ]
    found = dict(in_dtype(masters, "bfloat16"))
    assert torch.equal(found["w"], torch.tensor([1.0, 1.0], dtype=torch.bfloat16))
    assert (found["mask"].dtype, found["step"].dtype) == (torch.bool, torch.int64)
    (_, same), *_ = in_dtype(masters, "float32")
    assert same is masters[0][1], "nothing is copied where the dtype is the same already"


def test_biases_of_a_choice_stay_in_float32() -> None:
    exact, other = "model.layers.0.mlp.gate.e_score_correction_bias", "model.layers.0.mlp.gate.weight"
    found = dict(in_dtype([(exact, torch.ones(2)), (other, torch.ones(2))], "bfloat16"))
    assert (found[exact].dtype, found[other].dtype) == (torch.float32, torch.bfloat16)
