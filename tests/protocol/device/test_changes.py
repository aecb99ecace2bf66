"""Tests that coded changes give the new elements again, bit for bit, and never touch other memory."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protocol.device.changes import Changes, apply, encode_changes
from protocol.device.slice_digests import INTEGERS
from protocol.weights.deltas import GAP_WIDTHS, WHOLE


def decoded(found: Changes, old: np.ndarray) -> np.ndarray:
    """Read the format by its description, with numpy."""
    data = found.data.numpy().tobytes()
    gaps = np.frombuffer(data[: found.width * found.elements], f"<u{found.width or 1}")
    values = np.frombuffer(data[found.width * found.elements :], old.dtype)
    new = old.copy()
    new[... if found.width == WHOLE else np.cumsum(gaps.astype(np.int64) + 1) - 1] = values
    return new


@given(
    size=st.integers(0, 3000),
    share=st.sampled_from([0.0, 1e-3, 0.01, 0.1, 0.5, 0.9, 1.0]),
    itemsize=st.sampled_from([1, 2, 4, 8]),
    seed=st.integers(0, 2**32 - 1),
    before=st.integers(0, 9),
)
def test_changes_give_the_new_elements(
    size: int, share: float, itemsize: int, seed: int, before: int
) -> None:
    random = np.random.default_rng(seed)
    old = random.integers(0, 256, size * itemsize, np.uint8).view(f"<i{itemsize}")
    new = old.copy()
    changed = random.random(size) < share
    new[changed] ^= np.array(1, new.dtype)
    found = encode_changes(torch.from_numpy(old), torch.from_numpy(new))
    assert np.array_equal(decoded(found, old), new)
    target = torch.from_numpy(old.copy())
    data = torch.cat([torch.full((before,), 255, dtype=torch.uint8), found.data])[before:]
    apply(found._replace(data=data), target)
    assert np.array_equal(target.numpy(), new)
    assert len(found.data) <= new.nbytes
    assert found.elements >= changed.sum()
    assert (found.elements == 0) == np.array_equal(old, new)


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.0, 1e-5, 0.01, 0.3, 0.9])
def test_gpu_codes_as_the_cpu_does(share: float) -> None:
    old = torch.randint(-30_000, 30_000, (1 << 20,), dtype=torch.int16)
    new = torch.where(torch.rand(old.shape) < share, old ^ 1, old)
    expected, found = encode_changes(old, new), encode_changes(old.cuda(), new.cuda())
    assert found[:2] == expected[:2]
    assert torch.equal(found.data.cpu(), expected.data)
    target = old.cuda()
    apply(found, target)
    assert torch.equal(target.cpu(), new)
    apply(Changes(1, 9, torch.full((27,), 255, dtype=torch.uint8, device="cuda")), target[:10])
    assert torch.equal(target[10:].cpu(), new[10:])


@pytest.mark.parametrize(
    ("gap", "width"), [(3, 1), (255, 1), (256, 2), (600, 2), (65535, 2), (70000, 4), (1 << 20, 4)]
)
def test_gaps_take_the_width_with_the_fewest_bytes(gap: int, width: int) -> None:
    old = torch.zeros(8 * (gap + 1), dtype=torch.int16)
    new = old.clone()
    new[gap :: gap + 1] = 7
    found = encode_changes(old, new)
    assert np.array_equal(decoded(found, old.numpy()), new.numpy())
    sizes = {w: 8 * (1 + gap // 256**w) * (w + 2) for w in GAP_WIDTHS}
    assert len(found.data) == sizes[width] == min(sizes.values())
    assert found.width == width


def test_elements_whose_changes_take_more_bytes_come_whole() -> None:
    old = torch.zeros(999, dtype=torch.int16)
    for step, whole in ((1, True), (2, False)):
        new = old.clone()
        new[::step] = 1
        found = encode_changes(old, new)
        assert (found.width == WHOLE) == whole
        assert len(found.data) <= new.nbytes


@given(
    width=st.sampled_from(GAP_WIDTHS),
    itemsize=st.sampled_from([1, 2, 4, 8]),
    count=st.integers(0, 9),
    data=st.binary(min_size=108, max_size=108),
)
def test_changes_of_random_bytes_stay_within_the_elements(
    width: int, itemsize: int, count: int, data: bytes
) -> None:
    memory = torch.full((30,), 5, dtype=INTEGERS[itemsize])
    coded_data = torch.frombuffer(bytearray(data), dtype=torch.uint8)[: count * (width + itemsize)]
    apply(Changes(width, count, coded_data), memory[10:20])
    assert torch.equal(memory[:10], memory[20:])
    assert (memory[:10] == 5).all()
