"""Tests that coded changes give the new tensor again, bit for bit, and are refused where they leave it."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import WeightError
from protocol.messages import TensorEntry, WeightLink
from protocol.weights.deltas import (
    INDEX,
    WHOLE,
    WIDTHS,
    Coded,
    Delta,
    TensorChange,
    apply_change,
    coded,
    read_delta,
)


def entry(count: int) -> TensorEntry:
    return TensorEntry("a", "uint8", (count,), 0, 0, count, 0)


def data_of(found: Coded) -> np.ndarray:
    return np.frombuffer(b"".join(part.tobytes() for part in found.parts), np.uint8)


def restored(old: np.ndarray, found: Coded, before: int = 0) -> np.ndarray:
    """Apply changes that begin so many bytes into a delta."""
    data = np.concatenate([np.full(before, 255, np.uint8), data_of(found), np.full(3, 255, np.uint8)])
    target = old.copy()
    apply_change(TensorChange(0, found.width, found.elements, before), data, target, entry(len(old)))
    return target


@given(
    size=st.integers(0, 3000),
    share=st.sampled_from([0.0, 1e-3, 0.01, 0.1, 0.5, 0.9, 1.0]),
    itemsize=st.sampled_from([1, 2, 4, 8]),
    seed=st.integers(0, 2**32 - 1),
    before=st.integers(0, 9),
)
def test_changes_give_the_new_tensor(size: int, share: float, itemsize: int, seed: int, before: int) -> None:
    random = np.random.default_rng(seed)
    old = random.integers(0, 256, size * itemsize, np.uint8).view(f"<u{itemsize}")
    new = old.copy()
    changed = random.random(size) < share
    new[changed] ^= np.array(1, new.dtype)
    found = coded(old, new)
    if found is None:
        assert np.array_equal(old, new)
        return
    assert np.array_equal(restored(old, found, before), new)
    assert len(data_of(found)) <= new.nbytes
    assert found.elements >= changed.sum()


@pytest.mark.parametrize(
    ("gap", "width"), [(3, 1), (255, 1), (256, 2), (600, 2), (65535, 2), (70000, 4), (1 << 20, 4)]
)
def test_gaps_take_the_width_with_the_fewest_bytes(gap: int, width: int) -> None:
    old = np.zeros(8 * (gap + 1), "<u2")
    new = old.copy()
    new[gap :: gap + 1] = 7
    found = coded(old, new)
    assert found is not None
    assert np.array_equal(restored(old, found), new)
    sizes = {w: 8 * (1 + gap // 256**w) * (w + 2) for w in WIDTHS}
    assert len(data_of(found)) == sizes[width] == min(sizes.values())
    assert found.width == width


def test_tensor_whose_changes_take_more_bytes_comes_whole() -> None:
    old = np.zeros(999, "<u2")
    for step, whole in ((1, True), (2, False)):
        new = old.copy()
        new[::step] = 1
        found = coded(old, new)
        assert found is not None
        assert (found.width == WHOLE) == whole
        assert len(data_of(found)) <= new.nbytes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (TensorChange(0, 1, 3, 0), "its changes leave the delta"),
        (TensorChange(0, 1, 2, 5), "its changes leave the delta"),
        (TensorChange(0, 1, 1, -1), "its changes leave the delta"),
        (TensorChange(0, 1, -1, 0), "its changes leave the delta"),
        (TensorChange(0, 3, 1, 0), "its changes leave the delta"),
        (TensorChange(0, WHOLE, 1, 0), "1 elements, it has 4"),
        (TensorChange(0, 1, 1, 0), "changes element 9, it has 4"),
        (TensorChange(0, 2, 1, 0), "changes element 265, it has 4"),
    ],
)
def test_changes_that_leave_delta_or_tensor_are_refused(change: TensorChange, words: str) -> None:
    data, target = np.array([9, 1, 0, 0, 0, 0, 0], np.uint8), np.zeros(4, "<u2")
    with pytest.raises(WeightError, match=f"tensor a: {words}"):
        apply_change(change, data, target, entry(4))
    assert not target.any()


BASE, LINK = WeightLink("v1", 11, 4), WeightLink("v2", 12, 4)


@pytest.mark.parametrize(
    ("delta", "words"),
    [
        (Delta(base=10, digest=12, changes=()), r"changes 0*a to 0*c, the manifest says 0*b \(v1\) to 0*c"),
        (Delta(base=11, digest=13, changes=()), r"changes 0*b to 0*d"),
        (Delta(base=11, digest=12, changes=(TensorChange(2, 1, 0, 0),)), "tensors that the manifest has not"),
        (
            Delta(base=11, digest=12, changes=(TensorChange(-1, 1, 0, 0),)),
            "tensors that the manifest has not",
        ),
        (Delta(base=11, digest=12, changes=(TensorChange(1, 1, 0, 0),) * 2), "one twice"),
    ],
)
def test_delta_of_other_versions_or_tensors_is_refused(delta: Delta, words: str) -> None:
    with pytest.raises(WeightError, match=words):
        read_delta(msgspec.msgpack.encode(delta), BASE, LINK, 2)


def test_delta_that_is_cut_off_is_refused() -> None:
    whole = msgspec.msgpack.encode(Delta(base=11, digest=12, changes=(TensorChange(1, 1, 0, 0),)))
    for size in range(len(whole)):
        with pytest.raises(WeightError, match=f"v2/{INDEX}: "):
            read_delta(whole[:size], BASE, LINK, 2)
    assert read_delta(whole, BASE, LINK, 2).changes == (TensorChange(1, 1, 0, 0),)
