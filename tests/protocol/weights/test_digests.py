"""Digests: every implementation agrees with the definition, and with golden values."""

import random

import numpy as np
import pytest
import torch

from protocol.device.slice_digests import BATCH_BYTES, digests_of
from protocol.weights.digests import LENGTH, MASK, ROW, digest, digests_of_sums, multipliers

GOLDEN = ["9e3779b97f4a7c15", "d641fc5b64a8ae3a", "b10de5e917a45226"]
SIZES = (1, 2, 3, 4, 5, 63, 64, 4 * ROW - 1, 4 * ROW, 4 * ROW + 1, 12 * ROW + 8)


def signed(word: int, bits: int = 32) -> int:
    return word - ((word >> (bits - 1)) << bits)


def sums_by_definition(data: bytes) -> list[int]:
    """The sums h of the rows, word by word in Python's integers."""
    padded = data + bytes(-len(data) % 4)
    words = [int.from_bytes(padded[i : i + 4], "little", signed=True) for i in range(0, len(padded), 4)]
    inner = [int(x) for x in multipliers(0, ROW)]
    rows = [words[start : start + ROW] for start in range(0, len(words), ROW)]
    sums = [sum(word * factor for word, factor in zip(row, inner, strict=False)) & MASK for row in rows]
    return [signed(h, 64) for h in sums]


def by_definition(data: bytes) -> int:
    """The digest in Python's integers."""
    outer = [int(x) for x in multipliers(1, 64)]
    total = len(data) * LENGTH
    for r, h in enumerate(sums_by_definition(data)):
        total += signed(h & 0xFFFFFFFF) * outer[2 * r] + (h >> 32) * outer[2 * r + 1]
    return total & MASK


@pytest.mark.parametrize("size", SIZES)
def test_every_implementation_agrees_with_the_definition(size: int) -> None:
    data = random.Random(size).randbytes(size)
    assert digest(data) == by_definition(data)
    assert digests_of([torch.frombuffer(bytearray(data), dtype=torch.uint8)]) == [digest(data)]


def test_digests_of_many_tensors_are_those_of_each_with_empty_ones_between() -> None:
    data = [random.Random(size).randbytes(size) for size in (0, *SIZES, 0, 0, *SIZES, 0)]
    sums = [row for part in data for row in sums_by_definition(part)]
    found = digests_of_sums(np.array(sums, np.int64), [len(part) for part in data])
    assert found == [by_definition(part) if part else 0 for part in data]


def test_digests_equal_golden_values() -> None:
    assert digest(b"") == 0
    assert [f"{digest(text):016x}" for text in (b"\0", b"tether", bytes(range(256)) * 300)] == GOLDEN


def test_digest_changes_with_any_transfer_error() -> None:
    data = bytearray(random.Random(0).randbytes(16 * ROW))
    good = digest(data)
    wrong = {
        "a bit": lambda d: d.__setitem__(5, d[5] ^ 1),
        "the signs of two numbers": lambda d: (d.__setitem__(3, d[3] ^ 128), d.__setitem__(7, d[7] ^ 128)),
        "two words swapped": lambda d: d.__setitem__(slice(0, 8), d[4:8] + d[0:4]),
        "two rows swapped": lambda d: d.__setitem__(slice(0, 8 * ROW), d[4 * ROW : 8 * ROW] + d[: 4 * ROW]),
        "the same bit in two rows": lambda d: (
            d.__setitem__(0, d[0] ^ 1),
            d.__setitem__(4 * ROW, d[4 * ROW] ^ 1),
        ),
        "the end cut off": lambda d: d.__delitem__(slice(-4, None)),
        "zeros at the end": lambda d: d.extend(bytes(4)),
    }
    for what, harm in wrong.items():
        copy = bytearray(data)
        harm(copy)
        assert digest(copy) != good, what
    assert digest(bytes(4)) != digest(bytes(8))


def test_digests_of_tensors_are_those_of_their_bytes() -> None:
    columns = torch.arange(6, dtype=torch.bfloat16).view(2, 3).T
    found = digests_of([columns, torch.zeros(0, 3), torch.tensor(True)])
    assert found == [
        digest(columns.contiguous().view(torch.uint8).numpy().tobytes()),
        0,
        digest(b"\1"),
    ]


@pytest.mark.gpu
def test_digests_on_a_gpu_equal_those_on_the_host() -> None:
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in SIZES]
    tensors += [
        torch.randn(4096, 8192).bfloat16(),
        torch.zeros(0, 3),
        torch.randn(300, 500).T,
        torch.arange(200_000, dtype=torch.int32)[1:],
    ]
    tensors += [torch.randint(0, 256, (BATCH_BYTES // 3 + 1,), dtype=torch.uint8) for _ in range(7)]
    assert digests_of(tensor.cuda() for tensor in tensors) == digests_of(tensors)
