"""Versions as changes: what is written, read by engines that are current or late, and refused."""

import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import torch
from msgspec.structs import replace

import rollout.weights.deltas as deltas
from protocol.errors import WeightError
from protocol.messages import WeightManifest
from protocol.weights.buckets import manifest_digest
from protocol.weights.deltas import INDEX, Delta, changes_name
from rollout.staging.layers import LayeredStaging
from rollout.staging.staging import LiveAndStaged, Staging, digest_of, whole_source
from rollout.weights.registry import make_receiver
from rollout.weights.verification import Deadline
from tests.changes import WEIGHTS, slow_unless_changed
from tests.trainer.megatron.launch import launch
from tests.trainer.weights.senders import layout_of, received, sender_of
from trainer.config import WeightConfig
from trainer.weights.files import FileSender, disk_sender

BYTES = changes_name(0)
SHAPES = {"a": (300, 40), "b": (64,), "c": (40, 30)}
DTYPES = {"a": torch.bfloat16, "b": torch.float32, "c": torch.bfloat16}


def first() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(DTYPES[name]) for name, shape in SHAPES.items()}


def changed(tensors: Mapping[str, torch.Tensor], version: int, every: int = 97) -> dict[str, torch.Tensor]:
    """Change some elements of `a` and `c`."""
    found = {name: tensor.clone() for name, tensor in tensors.items()}
    for name in "ac":
        found[name].view(-1)[version % every :: every] += 1
    return found


def versions(count: int) -> Iterator[dict[str, torch.Tensor]]:
    tensors = first()
    for version in range(count):
        yield tensors
        tensors = changed(tensors, version)


@pytest.fixture(params=["shm", "disk", "http"])
def sender(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FileSender]:
    config = WeightConfig(
        transport=request.param,
        directory=str(tmp_path / "w"),
        bucket_mb=1,
        keep=1,
        delta=True,
        anchor_every=4,
    )
    with closing(sender_of(config, first().items(), tmp_path)) as made:
        assert isinstance(made, FileSender)
        yield made


def on_disk(config: WeightConfig, directory: Path) -> FileSender:
    return disk_sender(config, directory, layout_of(first().items(), config))


class Engine:
    """A staging copy, and live weights that are committed to."""

    def __init__(self, dtypes: Mapping[str, torch.dtype] = DTYPES) -> None:
        self.live = {name: torch.zeros(shape, dtype=dtypes[name]) for name, shape in SHAPES.items()}
        copy = {name: torch.empty_like(tensor) for name, tensor in self.live.items()}
        self.staging = Staging({name: whole_source(tensor) for name, tensor in copy.items()})
        self.weights = LiveAndStaged(self.live, copy)

    def serve(self, manifest: WeightManifest) -> None:
        self.staging.fetch(manifest, 10)
        self.staging.take(manifest)
        self.weights.apply()
        assert self.staging.live_digest(self.live.items()) == manifest.digest

    @property
    def read(self) -> int:
        """Bytes that the last version took."""
        return int(self.staging._receiver._receiver._image.read)  # type: ignore[union-attr]


def test_engines_that_are_current_late_or_skip_versions_get_every_version(sender: FileSender) -> None:
    current, every_third = Engine(), Engine()
    for version, tensors in enumerate(versions(10)):
        manifest = sender.publish("e1", version, tensors.items())
        assert manifest.digest == digest_of(tensors)
        assert len(manifest.chain) == 1 + version % 4
        assert sum(manifest.buckets) == manifest.chain[0].nbytes
        current.serve(manifest)
        assert current.read == manifest.chain[-1].nbytes
        if version % 3 == 2:
            every_third.serve(manifest)
        Engine().serve(manifest)
        sender.retire(frozenset())
        kept = sorted(path.name for path in sender.directory.iterdir() if path.name.startswith("v"))
        assert kept == [link.directory for link in manifest.chain]


def test_engine_with_wider_tensors_has_the_values_of_every_version(sender: FileSender) -> None:
    engine, late = (Engine({**DTYPES, "a": torch.float32}) for _ in range(2))
    for version, tensors in enumerate(versions(6)):
        manifest = sender.publish("e1", version, tensors.items())
        for one in (engine, late)[: 1 + (version == 5)]:
            one.serve(manifest)
            assert torch.equal(one.live["a"], tensors["a"].float())
        assert engine.read == manifest.chain[-1].nbytes
        sender.retire(frozenset())


def test_changes_take_few_bytes_and_no_buckets(sender: FileSender) -> None:
    tensors = first()
    anchor = sender.publish("e1", 0, tensors.items())
    manifest = sender.publish("e1", 1, changed(tensors, 0).items())
    directory = sender.directory / Path(manifest.location).name
    assert sorted(path.name for path in directory.iterdir()) == [INDEX, BYTES, "manifest.json"]
    elements = sum(len(range(0, tensors[name].numel(), 97)) for name in "ac")
    assert (directory / BYTES).stat().st_size == manifest.chain[-1].nbytes == elements * 3
    assert manifest.chain[-1].nbytes < sum(anchor.buckets) / 50
    same = sender.publish("e1", 2, changed(tensors, 0).items())
    assert same.chain[-1].nbytes == 0
    assert same.digest == manifest.digest


def test_tensor_that_changed_everywhere_comes_whole(sender: FileSender) -> None:
    tensors = first()
    sender.publish("e1", 0, tensors.items())
    manifest = sender.publish("e1", 1, changed(tensors, 0, every=1).items())
    assert manifest.chain[-1].nbytes == tensors["a"].nbytes + tensors["c"].nbytes
    Engine().serve(manifest)


def test_a_sender_that_starts_again_begins_with_an_anchor(tmp_path: Path) -> None:
    config = WeightConfig(bucket_mb=1, keep=1, delta=True, anchor_every=9)
    made, engine = list(versions(4)), Engine()
    before = on_disk(config, tmp_path)
    for version in range(3):
        engine.serve(before.publish("e1", version, made[version].items()))
    after = on_disk(config, tmp_path)
    after.retire(frozenset())  # the newest needs all three
    assert len(list((tmp_path / "weights").iterdir())) == 3
    manifest = after.publish("e2", 3, made[3].items())
    assert len(manifest.chain) == 1
    engine.serve(manifest)
    after.retire(frozenset())
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["v00000003-e2"]


def test_versions_that_are_reached_again_after_a_rewind_can_be_read(tmp_path: Path) -> None:
    sender = on_disk(WeightConfig(bucket_mb=1, keep=9, delta=True, anchor_every=20), tmp_path)
    made, following = list(versions(17)), Engine()
    chains: list[int] = []
    for version in (15, 15, 10, *range(11, 17)):
        # after the rewind 15 comes out different
        tensors = made[version] if chains else changed(made[version], 3)
        manifest = sender.publish("e1", version, tensors.items())
        chains.append(len(manifest.chain))
        following.serve(manifest)
        Engine().serve(manifest)
        assert digest_of(following.live) == digest_of(tensors)
        sender.retire(frozenset())
    assert chains == [1, 1, 1, 2, 3, 4, 5, 6, 7]


def test_version_that_is_published_under_a_new_epoch_is_a_change(sender: FileSender) -> None:
    tensors, engine = first(), Engine()
    engine.serve(sender.publish("e1", 0, tensors.items()))
    again = sender.publish("e2", 0, tensors.items())
    assert len(again.chain) == 2
    engine.serve(again)
    Engine().serve(again)


def test_version_that_cannot_be_published_is_followed_by_an_anchor(sender: FileSender) -> None:
    made = list(versions(3))
    sender.publish("e1", 0, made[0].items())

    def fails() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", made[1]["a"]
        raise WeightError("cannot be exported")

    with pytest.raises(WeightError, match="cannot be exported"):
        sender.publish("e1", 1, fails())
    assert len(sender.publish("e1", 1, made[1].items()).chain) == 1
    with pytest.raises(WeightError, match="the export has None where the version has c"):
        sender.publish("e1", 2, list(made[2].items())[:2])
    manifest = sender.publish("e1", 2, made[2].items())
    assert len(manifest.chain) == 1
    Engine().serve(manifest)


def test_version_that_could_not_be_renamed_is_no_base(
    sender: FileSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list(versions(3))
    sender.publish("e1", 0, made[0].items())

    def refuse(path: Path, target: Path) -> None:
        raise OSError(28, "no room")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        with pytest.raises(WeightError, match="no room"):
            sender.publish("e1", 1, made[1].items())
    manifest = sender.publish("e1", 2, made[2].items())
    assert len(manifest.chain) == 1
    Engine().serve(manifest)


@pytest.mark.parametrize(
    ("name", "words"),
    [("a", r"a: a piece of \[3\], not \[300, 40\]"), ("d", "the export has d where the version has None")],
)
def test_tensor_that_was_not_published_so_before_is_refused(
    sender: FileSender, name: str, words: str
) -> None:
    tensors = first()
    sender.publish("e1", 0, tensors.items())
    with pytest.raises(WeightError, match=words):
        sender.publish("e1", 1, {**tensors, name: torch.zeros(3)}.items())
    assert len(sender.publish("e1", 1, tensors.items()).chain) == 1


def test_version_can_be_received_with_layers(sender: FileSender) -> None:
    live = {name: torch.zeros(shape, dtype=DTYPES[name]) for name, shape in SHAPES.items()}
    layers = LayeredStaging({name: whole_source(tensor) for name, tensor in live.items()})
    for version, tensors in enumerate(versions(6)):
        manifest = sender.publish("e1", version, tensors.items())
        layers.fetch(manifest, 10)
        layers.take(manifest)
        layers.apply()
        assert digest_of(live) == manifest.digest


def _flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _with_index(directory: Path, **changes: int) -> None:
    delta = msgspec.msgpack.decode((directory / INDEX).read_bytes(), type=Delta)
    (directory / INDEX).write_bytes(msgspec.msgpack.encode(replace(delta, **changes)))


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped value": (lambda path: _flip(path / BYTES, -1), "tensor c: digest"),
    "flipped gap": (lambda path: _flip(path / BYTES, 1), "tensor a: digest"),
    "truncated": (
        lambda path: (path / BYTES).write_bytes((path / BYTES).read_bytes()[:-1]),
        "fewer bytes than the manifest says",
    ),
    "no changes": (lambda path: (path / BYTES).unlink(), f"{BYTES}: No such file"),
    "no index": (lambda path: (path / INDEX).unlink(), f"{INDEX}: No such file"),
    "wrong base": (lambda path: _with_index(path, base=1), "changes 0000000000000001 to"),
    "wrong version": (lambda path: _with_index(path, digest=1), "to 0000000000000001"),
    "left out": (lambda path: _with_index(path, changes=()), "tensor a: digest"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("late", [False, True], ids=["current", "late"])
@pytest.mark.parametrize("link", [1, 2], ids=["middle", "last"])
def test_faulty_chain_is_refused_and_the_engine_keeps_its_version(
    tmp_path: Path, fault: str, late: bool, link: int
) -> None:
    sender = on_disk(WeightConfig(bucket_mb=1, keep=9, delta=True, anchor_every=9), tmp_path)
    made, engine = list(versions(4)), Engine()
    served = sender.publish("e1", 0, made[0].items())
    engine.serve(served)
    manifests = [sender.publish("e1", version, made[version].items()) for version in (1, 2, 3)]
    reader = Engine() if late else engine
    before, (spoil, words) = digest_of(reader.live), FAULTS[fault]
    directory = Path(manifests[link - 1].location)
    kept = {path.name: path.read_bytes() for path in directory.iterdir()}
    spoil(directory)
    with pytest.raises(WeightError, match=words):
        reader.staging.fetch(manifests[1], 10)
    assert digest_of(reader.live) == before
    assert reader.staging.staged is None
    with pytest.raises(WeightError, match="not staged"):
        reader.staging.take(manifests[1])
    for name, data in kept.items():  # a fault of the link, not of the trainer
        (directory / name).write_bytes(data)
    reader.serve(manifests[2])


@pytest.mark.parametrize("fault", ["missing", "truncated", "flipped"])
def test_faulty_anchor_is_refused_for_the_late_alone(tmp_path: Path, fault: str) -> None:
    sender = on_disk(WeightConfig(bucket_mb=1, keep=9, delta=True, anchor_every=9), tmp_path)
    made, current, late = list(versions(2)), Engine(), Engine()
    anchor = sender.publish("e1", 0, made[0].items())
    current.serve(anchor)
    manifest = sender.publish("e1", 1, made[1].items())
    bucket = Path(anchor.location) / "bucket_00000.bin"
    if fault == "missing":
        bucket.unlink()
    elif fault == "truncated":
        bucket.write_bytes(bucket.read_bytes()[:-1])
    else:
        _flip(bucket, 999)
    with pytest.raises(WeightError, match="bucket_00000" if fault != "flipped" else "tensor a: digest"):
        late.staging.fetch(manifest, 10)
    current.serve(manifest)


def test_chain_that_ends_with_another_version_is_refused(tmp_path: Path) -> None:
    sender = on_disk(WeightConfig(bucket_mb=1, keep=9, delta=True, anchor_every=9), tmp_path)
    made = list(versions(3))
    manifests = [sender.publish("e1", version, made[version].items()) for version in range(3)]
    wrong = replace(manifests[2], chain=manifests[1].chain)
    with pytest.raises(WeightError, match="version 2: its chain ends with v00000001-e1"):
        list(received(make_receiver("disk"), wrong, 30))
    entries = (replace(manifests[2].tensors[0], digest=5), *manifests[2].tensors[1:])
    forged = replace(manifests[2], tensors=entries, digest=manifest_digest(entries))
    with pytest.raises(WeightError, match="its chain ends"):
        list(received(make_receiver("disk"), forged, 30))


def test_anchor_of_files_of_its_own_is_read_without_a_second_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deltas, "RUN_BYTES", 1 << 20)
    tensors = {f"t{number}": torch.full((1 << 19,), number, dtype=torch.uint8) for number in range(32)}
    config = WeightConfig(bucket_mb=1)
    sender = disk_sender(config, tmp_path, layout_of(tensors.items(), config), per_rank_files=True)
    manifest, image = sender.publish("e1", 0, tensors.items()), deltas.VersionImage()
    tracemalloc.start()  # numpy's memory and that of ranges
    buckets = image.advance(manifest, Deadline(manifest, 30))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert image.read == sum(manifest.buckets) == 16 << 20
    assert peak < image.read + (5 << 20)
    assert torch.equal(torch.cat(buckets), torch.cat(list(tensors.values())))


@pytest.mark.parametrize("delta", [False, True])
def test_anchor_that_no_changes_follow_leaves_memory(tmp_path: Path, delta: bool) -> None:
    large, bucket_bytes = {"a": torch.randn(1 << 20)}, 4 << 20
    config = WeightConfig(directory=str(tmp_path), delta=delta, anchor_every=4)
    image, held = deltas.VersionImage(), []
    tracemalloc.start()
    with closing(
        disk_sender(config, tmp_path, layout_of(large.items(), config), per_rank_files=True)
    ) as sender:
        for version in range(3):
            large["a"][version] += 1
            manifest = sender.publish("e1", version, large.items())
            (bucket,) = image.advance(manifest, Deadline(manifest, 10))
            image.verified(manifest)
            assert torch.equal(bucket.view(torch.float32), large["a"])
            del bucket
            held.append(tracemalloc.get_traced_memory()[0] > bucket_bytes)
    tracemalloc.stop()
    assert held == [True, delta, delta]
    assert (image.read < bucket_bytes) == delta


def test_anchor_that_is_staged_again_stays_for_changes(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(1 << 10)}
    config, image = WeightConfig(delta=True, anchor_every=4), deltas.VersionImage()
    with closing(disk_sender(config, tmp_path, layout_of(tensors.items(), config))) as sender:
        manifest = sender.publish("e1", 0, tensors.items())
        for nbytes in (4 << 10, 0, 0):
            image.advance(manifest, Deadline(manifest, 10))
            image.verified(manifest)
            assert image.read == nbytes


@slow_unless_changed(*WEIGHTS)
@pytest.mark.parametrize(
    ("ranks", "words"), [(2, ["delta"]), (3, ["delta", "apart"]), (2, ["apart"])], ids=str
)
def test_ranks_write_their_own_pieces(tmp_path: Path, ranks: int, words: list[str]) -> None:
    (tmp_path / "versions").mkdir()
    launch(
        ranks, "tests.trainer.weights.file_ranks", str(tmp_path / "versions"), *words, logs=tmp_path / "logs"
    )
