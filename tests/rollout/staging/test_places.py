"""Tests where versions are staged: by arithmetic of memory, and refused with the numbers."""

import pytest
import torch

from protocol.errors import EngineError, EngineSettingsError
from rollout.staging.places import (
    MIB,
    RECEIVING_BYTES,
    FreeMemory,
    StagingPlace,
    StagingRoom,
    choose_place,
    first_fitting_place,
    pack_slabs,
)

GIB = 1 << 30
EXPERTS = [768 * MIB, 384 * MIB, 16 * MIB, 4096] * 48 + [594 * MIB]
"""Sizes as of a model of 30B with 128 experts a layer."""
PARAMETERS = [GIB, 2 * GIB, 4 * GIB, 8 * GIB]
"""15 GiB, and as many in slabs."""
AUTO = StagingRoom(StagingPlace.AUTO)


@pytest.mark.parametrize(
    ("free", "place"),
    [
        (FreeMemory(16 * GIB, 0, on_gpu=True), StagingPlace.DEVICE),
        # receiving takes more than the copy
        (FreeMemory(15 * GIB, 15 * GIB, on_gpu=True), StagingPlace.HOST),
        (FreeMemory(8 * GIB, 14 * GIB, on_gpu=True), StagingPlace.LAYERS),
        (FreeMemory(1 * GIB, 2 * GIB, on_gpu=True), StagingPlace.LAYERS),
        (FreeMemory(15 * GIB, 15 * GIB, on_gpu=False), StagingPlace.DEVICE),
        (FreeMemory(14 * GIB, 14 * GIB, on_gpu=False), StagingPlace.LAYERS),
        (FreeMemory(1 * GIB, 1 * GIB, on_gpu=False), StagingPlace.LAYERS),
    ],
)
def test_auto_is_the_first_place_that_fits(free: FreeMemory, place: StagingPlace) -> None:
    assert first_fitting_place(AUTO, PARAMETERS, GIB, free, "it") == place


def test_copy_is_never_layers() -> None:
    room = StagingRoom(StagingPlace.COPY)
    assert (
        first_fitting_place(room, PARAMETERS, GIB, FreeMemory(16 * GIB, 0, on_gpu=True), "it")
        == StagingPlace.DEVICE
    )
    assert (
        first_fitting_place(room, PARAMETERS, GIB, FreeMemory(8 * GIB, 15 * GIB, on_gpu=True), "it")
        == StagingPlace.HOST
    )
    with pytest.raises(EngineError, match="512 MiB on the device and 15360 MiB in host memory"):
        first_fitting_place(room, PARAMETERS, GIB, FreeMemory(8 * GIB, 14 * GIB, on_gpu=True), "it")


@pytest.mark.parametrize(("shadow", "place"), [(0, StagingPlace.DEVICE), (2 * GIB, StagingPlace.HOST)])
def test_memory_of_shadows_is_counted_on_the_device(shadow: int, place: StagingPlace) -> None:
    free = FreeMemory(16 * GIB, 15 * GIB, on_gpu=True)
    assert first_fitting_place(StagingRoom(StagingPlace.COPY), PARAMETERS, GIB, free, "it", shadow) == place
    small = FreeMemory(15 * GIB - 1, 15 * GIB - 1, on_gpu=False)
    with pytest.raises(EngineError, match=f"needs {(15 * GIB + shadow) // MIB} MiB in addition"):
        first_fitting_place(StagingRoom(StagingPlace.DEVICE), PARAMETERS, GIB, small, "it", shadow)


@pytest.mark.parametrize("sizes", [EXPERTS, [768 * MIB], [1, 2, 3], [20 * GIB, 5], []])
def test_pinned_slabs_hold_each_tensor_apart(sizes: list[int]) -> None:
    slabs, places = pack_slabs(sizes)
    assert all(size.bit_count() == 1 for size in slabs)
    ends = dict.fromkeys(range(len(slabs)), 0)
    for (slab, offset), size in sorted(zip(places, sizes, strict=True)):
        assert offset % 64 == 0
        assert ends[slab] <= offset
        ends[slab] = offset + size
    assert all(end <= slabs[slab] for slab, end in ends.items())


def test_slabs_take_little_more_than_the_tensors() -> None:
    assert sum(pack_slabs(EXPERTS)[0]) < 1.02 * sum(EXPERTS)


def test_host_memory_is_that_of_the_slabs() -> None:
    sizes, room = [5 * GIB] * 3, StagingRoom(StagingPlace.COPY)
    free = FreeMemory(8 * GIB, 24 * GIB, on_gpu=True)  # three slabs of 8 GiB
    assert first_fitting_place(room, sizes, 5 * GIB, free, "it") == StagingPlace.HOST
    with pytest.raises(EngineError, match="512 MiB on the device and 24576 MiB in host memory"):
        first_fitting_place(room, sizes, 5 * GIB, FreeMemory(8 * GIB, 24 * GIB - 1, on_gpu=True), "it")


def test_auto_leaves_the_device_that_staging_mb_forbids() -> None:
    room = StagingRoom(StagingPlace.AUTO, 1024)
    assert (
        first_fitting_place(room, PARAMETERS, GIB, FreeMemory(80 * GIB, 80 * GIB, on_gpu=True), "it")
        == StagingPlace.LAYERS
    )


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (
            StagingPlace.DEVICE,
            f"staging needs {15 * 1024 + RECEIVING_BYTES // MIB} MiB in addition to the live parameters",
        ),
        (StagingPlace.HOST, "512 MiB on the device and 15360 MiB in host memory"),
        (StagingPlace.LAYERS, "1024 MiB on the device and 2048 MiB in host memory"),
        (StagingPlace.AUTO, "1024 MiB on the device and 2048 MiB in host memory"),
    ],
)
def test_place_without_room_is_refused_with_the_numbers(place: StagingPlace, words: str) -> None:
    with pytest.raises(EngineError, match=words) as error:
        first_fitting_place(StagingRoom(place), PARAMETERS, GIB, FreeMemory(GIB, GIB, on_gpu=True), "cuda:0")
    assert "1024 MiB are free on cuda:0 and 1024 MiB on the host" in str(error.value)
    assert "(engine.staging)" in str(error.value)
    assert not isinstance(error.value, EngineSettingsError)  # a later start may find the memory


def test_copy_over_staging_mb_is_refused_with_both_numbers() -> None:
    parameters = [torch.empty(3 << 20, dtype=torch.uint8)]
    choose_place(StagingRoom(), parameters, 0)
    choose_place(StagingRoom(mb=3), parameters, 0)
    with pytest.raises(EngineError, match=r"engine.staging_mb is 2, a copy of the parameters takes 3 MiB"):
        choose_place(StagingRoom(mb=2), parameters, 0)


def test_copy_without_room_is_refused_before_it_is_allocated() -> None:
    huge = torch.empty(1, dtype=torch.uint8).expand(1 << 50)
    with pytest.raises(
        EngineError, match=r"staging needs 1073741824 MiB .* MiB are free on cpu: lower engine.kv_cache_mb"
    ):
        choose_place(StagingRoom(), [huge], 0)
