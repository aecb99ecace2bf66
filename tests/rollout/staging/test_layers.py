"""Tests places of versions: what each allocates, and commits that are whole, refused or poisoned."""

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from protocol.device.page_locks import LockCalls, PageLocks
from protocol.errors import WeightError
from protocol.messages import TensorEntry, WeightManifest
from rollout.engines.contract.models import write_shm
from rollout.staging.layers import COPY_BYTES, LayeredStaging, PieceBuffer, copy_by_threads
from rollout.staging.places import StagingPlace, StagingRoom, allocate_copies
from rollout.staging.rank import RankStaging
from rollout.staging.rank_status import RankState
from rollout.staging.staging import digest_of, whole_source
from rollout.staging.staging_plan import trace
from rollout.weights.base import ReceivedSlice
from rollout.weights.registry import RECEIVERS
from tests.protocol.device.page_calls import kernel_calls, locked_kib
from tests.rollout.staging.models import SHAPES, Fused, traced

PLACES = [StagingPlace.DEVICE, StagingPlace.HOST, StagingPlace.LAYERS]


class Allocations(TorchDispatchMode):
    """Counts the bytes that operators allocate on each device; views of other tensors are none."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: dict[str, int] = {}
        self._seen: list[torch.Tensor] = []
        """Keeps storages alive, whose addresses would be used again."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {one.untyped_storage()._cdata for one in args if isinstance(one, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, list | tuple) else [made]:
            if isinstance(one, torch.Tensor) and one.untyped_storage()._cdata not in given:
                self._seen.append(one)
                self.nbytes[one.device.type] = self.nbytes.get(one.device.type, 0) + one.nbytes
        return made


class OnMeta(Fused):
    """The model on a device that is not the host, and holds no bytes."""

    def __init__(self) -> None:
        with torch.device("meta"):
            super().__init__()


def staged(share: RankStaging, manifest: WeightManifest) -> RankState:
    """Stage a version, and wait for the end of it."""
    assert share.stage(manifest, 10) == ""
    end = time.monotonic() + 10
    while share.status().state == RankState.STAGING and time.monotonic() < end:
        time.sleep(0.001)
    return share.status().state


def rank(model: Fused, place: StagingPlace) -> RankStaging:
    return RankStaging(traced(model, place=place), architecture="", tied=False)


def new_version(path: Path, number: int = 1) -> tuple[dict[str, torch.Tensor], WeightManifest]:
    torch.manual_seed(number)
    new = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    return new, write_shm(path / f"v{number}", new, number)


@pytest.mark.parametrize("place", PLACES)
def test_rank_commits_the_version_from_each_place(tmp_path: Path, place: StagingPlace) -> None:
    model, other = Fused(), Fused()
    share = rank(model, place)
    padding, before = model.embed[5:].clone(), share.live_digest()
    for number in (1, 2):
        new, manifest = new_version(tmp_path, number)
        assert staged(share, manifest) == RankState.STAGED
        assert share.live_digest() == before
        assert share.commit(manifest).applied
        before = share.live_digest()
        assert before == (True, digest_of(new)) == (True, manifest.digest)
        other.load_weights(new.items())
        assert torch.equal(model.qk, other.qk)
        assert torch.equal(model.embed[:5], other.embed[:5])
        assert torch.equal(model.embed[5:], padding)


@pytest.mark.parametrize("place", PLACES)
def test_only_the_place_device_allocates_a_copy_on_the_device(place: StagingPlace) -> None:
    parameters = {name: one.detach() for name, one in OnMeta().named_parameters()}
    sources = {name: whole_source(one) for name, one in parameters.items()}
    copy, largest = (of(one.nbytes for one in parameters.values()) for of in (sum, max))
    with Allocations() as found:
        if place == StagingPlace.LAYERS:
            LayeredStaging(sources)
        else:
            allocate_copies(place, parameters)
    expected = {
        StagingPlace.DEVICE: {"meta": copy},
        StagingPlace.HOST: {"cpu": copy},
        StagingPlace.LAYERS: {"meta": largest},
    }
    assert found.nbytes == expected[place]


def test_layers_stage_and_commit_within_the_largest_tensor(tmp_path: Path) -> None:
    target = {f"layer.{n}": torch.zeros(64, 64) for n in range(16)}
    new = {name: torch.randn_like(one) for name, one in target.items()}
    manifest = write_shm(tmp_path / "v1", new, 1)
    layers = LayeredStaging({name: whole_source(one) for name, one in target.items()})
    with Allocations() as found:
        layers.fetch(manifest, 10)
        layers.take(manifest)
        layers.apply()
    assert found.nbytes.get("cpu", 0) == 0
    assert layers.buffer.memory.nbytes == 64 * 64 * 4
    assert digest_of(target) == manifest.digest


def test_small_tensors_share_the_buffer() -> None:
    sizes = [64, 10, 7, 30, 64, 1, 0, 3]
    pieces = [
        ReceivedSlice(
            TensorEntry(str(n), "float32", (size,), 0, 0, 4 * size, 0), ((0, size),), torch.rand(size)
        )
        for n, size in enumerate(sizes)
    ]
    buffer, lengths = PieceBuffer(4 * 64, torch.device("cpu")), []
    found: list[ReceivedSlice] = []
    for batch in buffer.batches(pieces):
        lengths.append(len(batch))
        found += [piece._replace(tensor=piece.tensor.clone()) for piece in batch]
    assert lengths == [1, 3, 1, 3]
    assert [piece.entry for piece in found] == [piece.entry for piece in pieces]
    assert all(torch.equal(one.tensor, other.tensor) for one, other in zip(found, pieces, strict=True))


def test_staged_layers_outlive_their_files(tmp_path: Path) -> None:
    model = Fused()
    share = rank(model, StagingPlace.LAYERS)
    new, manifest = new_version(tmp_path)
    assert staged(share, manifest) == RankState.STAGED
    for path in sorted(Path(manifest.location).iterdir()):
        path.unlink()
    assert share.commit(manifest).applied
    assert share.live_digest() == (True, digest_of(new))


def flip(manifest: WeightManifest, name: str) -> None:
    """Invert one bit of a tensor in its file."""
    entry = next(entry for entry in manifest.tensors if entry.name == name)
    with (Path(manifest.location) / f"bucket_{entry.bucket:05d}.bin").open("rb+") as file:
        file.seek(entry.offset)
        byte = file.read(1)[0]
        file.seek(entry.offset)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("name", list(SHAPES))
def test_bit_that_is_wrong_when_layers_are_staged_changes_nothing(tmp_path: Path, name: str) -> None:
    share = rank(Fused(), StagingPlace.LAYERS)
    _, first = new_version(tmp_path, 1)
    staged(share, first)
    share.commit(first)
    before = share.live_digest()
    _, manifest = new_version(tmp_path, 2)
    flip(manifest, name)
    assert staged(share, manifest) == RankState.FAILED
    assert f"tensor {name}: digest" in share.status().error
    assert not share.status().poisoned
    found = share.commit(manifest)
    assert (found.applied, found.poisoned) == (False, False)
    assert share.live_digest() == before
    _, again = new_version(tmp_path, 3)
    assert staged(share, again) == RankState.STAGED
    assert share.commit(again).applied


@pytest.mark.parametrize("name", list(SHAPES))
def test_bit_that_changes_between_stage_and_commit_poisons(tmp_path: Path, name: str) -> None:
    share = rank(Fused(), StagingPlace.LAYERS)
    _, manifest = new_version(tmp_path)
    assert staged(share, manifest) == RankState.STAGED
    flip(manifest, name)
    found = share.commit(manifest)
    assert (found.applied, found.poisoned) == (False, True)
    assert found.error == f"version 1: tensor {name} was changed after it was verified"


def test_parts_of_layers_that_the_loader_permutes_or_leaves_out_are_placed(tmp_path: Path) -> None:
    live = torch.zeros(3, 4)
    whole = torch.arange(24.0).view(6, 4)

    def load(named: Iterator[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in named:
            live[:2].copy_(tensor[1::4])
            live[2:].copy_(tensor[:1])

    plan = trace(load, [("w", live)], {"w": (6, 4)}, torch.float32, StagingRoom(StagingPlace.LAYERS))
    share = RankStaging(plan, architecture="", tied=False)
    manifest = write_shm(tmp_path / "v1", {"w": whole}, 1)
    assert staged(share, manifest) == RankState.STAGED
    assert share.commit(manifest).applied
    assert torch.equal(live, whole[[1, 5, 0]])


@pytest.mark.parametrize(
    "transport", sorted(name for name, make in RECEIVERS.items() if not make().is_persistent)
)
def test_layers_refuse_a_transport_that_sends_once(tmp_path: Path, transport: str) -> None:
    target = torch.zeros(4)
    layers = LayeredStaging({"a": whole_source(target)})
    manifest = write_shm(tmp_path / "v1", {"a": torch.ones(4)}, 1)
    with pytest.raises(WeightError, match=f"'layers', which reads a version twice, .*'{transport}' sends it"):
        layers.fetch(msgspec.structs.replace(manifest, transport=transport), 10)
    assert torch.equal(target, torch.zeros(4))
    assert layers.staged is None


def test_sleep_releases_the_buffer_of_layers(tmp_path: Path) -> None:
    plan = traced(Fused(), place=StagingPlace.LAYERS)
    share = RankStaging(plan, architecture="", tied=False)
    (buffer,) = plan.releasable
    assert buffer.untyped_storage().nbytes() == max(one.nbytes for one in plan.live.values()) - 3 * 4 * 4
    for number in (1, 2):
        new, manifest = new_version(tmp_path, number)
        assert staged(share, manifest) == RankState.STAGED
        assert share.commit(manifest).applied
        assert share.sleep() == share.sleep() == ""
        assert buffer.untyped_storage().nbytes() == 0
        assert share.wake() == share.wake() == ""
    assert staged(share, manifest) == RankState.STAGED
    assert share.commit(manifest).applied
    assert share.live_digest() == (True, digest_of(new))


def test_discarded_layers_keep_no_file_mapped(tmp_path: Path) -> None:
    layers = LayeredStaging({"a": whole_source(torch.zeros(4))})
    manifest = write_shm(tmp_path / "v1", {"a": torch.ones(4)}, 1)
    for end in (layers.discard, lambda: (layers.take(manifest), layers.apply())):
        layers.fetch(manifest, 10)
        assert str(tmp_path) in Path("/proc/self/maps").read_text()
        end()
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def locking(calls: LockCalls, **live: torch.Tensor) -> LayeredStaging:
    """Return a staging that maps files as with a GPU, and locks them by `calls`."""
    layers = LayeredStaging({name: whole_source(one) for name, one in live.items()})
    layers.buffer.locks = PageLocks(torch.device("cpu"), calls)
    return layers


def test_pages_of_a_version_are_locked_until_its_commit(tmp_path: Path) -> None:
    live = {name: torch.zeros(64, 64) for name in "abc"}
    layers = locking(kernel_calls(), **live)
    for number in (1, 2):
        new = {name: torch.randn(64, 64) for name in live}
        manifest = write_shm(tmp_path / f"v{number}", new, number)
        layers.fetch(manifest, 10)
        nbytes = sum(path.stat().st_size for path in Path(manifest.location).glob("bucket_*"))
        assert layers.buffer.locks.nbytes == nbytes
        assert locked_kib(tmp_path) >= nbytes >> 10
        layers.take(manifest)
        layers.apply()
        assert layers.buffer.locks.wait(10)
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()
        assert digest_of(live) == manifest.digest


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_pages_that_are_not_locked_go_through_pinned_memory(tmp_path: Path, limit: int) -> None:
    live = {name: torch.zeros(64) for name in "ab"}
    layers = locking(kernel_calls(limit=limit, refused=12), **live)
    pinned, locks = torch.zeros(2, 4 * 64, dtype=torch.uint8), layers.buffer.locks
    layers.buffer = PieceBuffer(4 * 64, torch.device("cpu"), list(pinned))
    layers.buffer.locks = locks
    new = {name: torch.randn(64) for name in live}
    manifest = write_shm(tmp_path / "v1", new, 1, bucket_bytes=1)
    assert len(manifest.buckets) == 2
    layers.fetch(manifest, 10)
    assert [locks.holds(piece.tensor) for piece in layers._pieces] == [limit > 0, limit > 1]
    layers.take(manifest)
    layers.apply()
    assert digest_of(live) == manifest.digest
    expected = torch.zeros(2, 64)
    for row, tensor in enumerate(list(new.values())[limit:]):
        expected[row] = tensor
    assert torch.equal(pinned.view(torch.float32), expected)


def test_cancelled_staging_unlocks_pages(tmp_path: Path) -> None:
    calls = kernel_calls()
    layers = locking(calls, a=torch.zeros(64), b=torch.zeros(64))

    def lock(address: int, nbytes: int) -> int:
        layers.cancel()  # another thread does, while the first pages are locked
        return calls.lock(address, nbytes)

    layers.buffer.locks = PageLocks(torch.device("cpu"), LockCalls(lock, calls.unlock))
    manifest = write_shm(tmp_path / "v1", {"a": torch.ones(64), "b": torch.ones(64)}, 1)
    with pytest.raises(WeightError, match="staging of version 1 was cancelled"):
        layers.fetch(manifest, 10)
    layers.discard()
    assert layers.buffer.locks.wait(10)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert layers.staged is None


def test_closed_layers_have_unlocked_their_pages(tmp_path: Path) -> None:
    layers = locking(kernel_calls(), a=torch.zeros(64))
    layers.fetch(write_shm(tmp_path / "v1", {"a": torch.ones(64)}, 1), 10)
    assert layers.buffer.locks.nbytes == 4 * 64
    layers.close()
    assert layers.buffer.locks.wait(0)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert layers.staged is None


class CancelledWait(PageLocks):
    """Locks of a staging that another thread cancels while it waits for them."""

    layers: LayeredStaging

    def wait(self, seconds: float) -> bool:
        self.layers.cancel()
        return super().wait(seconds)


def test_version_does_not_wait_long_for_the_pages_of_the_one_before(tmp_path: Path) -> None:
    live, calls, may_unlock = torch.zeros(64), kernel_calls(), threading.Event()
    slow = LockCalls(calls.lock, lambda address: calls.unlock(address) if may_unlock.wait(60) else 1)
    layers = locking(slow, a=live)
    for number in (1, 2):
        manifest = write_shm(tmp_path / f"v{number}", {"a": torch.randn(64)}, number)
        layers.fetch(manifest, 2)
        assert bool(layers.buffer.locks.nbytes) == (number == 1)
        layers.take(manifest)
        layers.apply()
        assert digest_of({"a": live}) == manifest.digest
    locks = layers.buffer.locks
    layers.buffer.locks = cancelled = CancelledWait(torch.device("cpu"), slow)
    cancelled.layers, cancelled._unlocking = layers, locks._unlocking
    with pytest.raises(WeightError, match="staging of version 2 was cancelled"):
        layers.fetch(manifest, 600)
    may_unlock.set()
    assert locks.wait(10)


def test_private_pages_are_not_locked(tmp_path: Path) -> None:
    live = torch.zeros(64)
    layers = locking(kernel_calls(), a=live)
    manifest = write_shm(tmp_path / "v1", {"a": torch.ones(64)}, 1)
    path = Path(manifest.location) / "bucket_00000.bin"
    sealed = os.memfd_create("sealed", os.MFD_ALLOW_SEALING)
    try:
        os.write(sealed, path.read_bytes())
        fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)  # it cannot be mapped as shared
        path.unlink()
        path.symlink_to(f"/proc/self/fd/{sealed}")
        layers.fetch(manifest, 10)
    finally:
        os.close(sealed)
    assert layers.buffer.locks.nbytes == 0  # the kernel would copy each
    layers.take(manifest)
    layers.apply()
    assert digest_of({"a": live}) == manifest.digest


def test_files_are_mapped_as_shared_only_to_lock_their_pages(tmp_path: Path) -> None:
    manifest = write_shm(tmp_path / "v1", {"a": torch.ones(64)}, 1)
    for calls, mode in ((None, "rw-p"), (kernel_calls(), "rw-s")):
        layers = LayeredStaging({"a": whole_source(torch.zeros(64))})
        layers.buffer.locks = PageLocks(torch.device("cpu"), calls)
        layers.fetch(manifest, 10)
        maps = Path("/proc/self/maps").read_text().splitlines()
        assert [line.split()[1] for line in maps if str(tmp_path) in line] == [mode]
        layers.close()


def test_threads_copy_parts_to_their_offsets() -> None:
    sizes = [0, 1, 2 * COPY_BYTES + 3, 7]
    parts = [torch.randint(256, (size,), dtype=torch.uint8) for size in sizes]
    starts = [sum(sizes[:n]) + n for n in range(len(sizes))]
    memory = torch.zeros(sum(sizes) + len(sizes), dtype=torch.uint8)
    copy_by_threads(memory, zip(starts, parts, strict=True))
    for start, part in zip(starts, parts, strict=True):
        assert torch.equal(memory[start : start + len(part)], part)
    with pytest.raises(ValueError, match="broadcast"):
        copy_by_threads(memory[:4], [(0, parts[3])])
