"""Fetches weight versions into a staging copy, which has the layout of the live parameters."""

import threading
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

import torch

from protocol.device.slice_digests import Digests, bits_of
from protocol.errors import UnfitVersion, WeightError
from protocol.messages import TensorEntry, WeightManifest
from protocol.weights.buckets import layout_digest, manifest_digest
from protocol.weights.draft_head import has_head, without_head
from rollout.engines.base import Served
from rollout.staging.placement import ExpectedTensor, Slice, SlicePlacement
from rollout.weights.base import WeightReceiver
from rollout.weights.registry import make_receiver

WIDENINGS: Set[tuple[str, str]] = frozenset({("bfloat16", "float32"), ("float16", "float32")})
"""(type in a version, type in an engine) of tensors that are converted: no value is rounded."""


class Committable(Protocol):
    """Live weights that a staged version can be copied into."""

    def apply(self) -> None:
        """Copy the version that `take` returned last over the live weights.

        It does no communication, and where there is a copy no I/O and no allocation on the device.
        """


@dataclass(frozen=True, slots=True)
class LiveAndStaged:
    """Live parameters and their staging copy, by the same names; on one device, or the copy on the host."""

    live: dict[str, torch.Tensor]
    copy: dict[str, torch.Tensor]

    def apply(self) -> None:
        """See `Committable`."""
        copy_over(self.live, self.copy)


class Staging:
    """Staging copy of one version at a time; the next fetch discards it.

    States: empty -> (fetch) -> staged -> (take) -> empty. A fetch that fails leaves it empty.

    Some engines hold a few parameters in float32 whatever the type of their model: biases of experts, decays
    of gated delta nets. A version's tensor in 16 bits is converted as it is placed, and digested as it was
    published.
    """

    widenings = WIDENINGS
    """Conversions that are made; empty where the engine computes with the version's own memory."""

    def __init__(
        self, sources: Mapping[str, ExpectedTensor], *, architecture: str = "", tied: bool = False
    ) -> None:
        """Expect versions of these tensors.

        Args:
            sources: checkpoint name -> the tensor that the engine expects.
            architecture: class of the model in transformers; empty: any.
            tied: input and output embeddings are one tensor in this engine.
        """
        self._sources = sources
        self._architecture = architecture
        self._tied = tied
        self.elsewhere: Set[str] = frozenset()
        """Names of tensors that a version has for other ranks only, such as those of their experts."""
        self._staged: Served | None = None
        self._transport = ""
        """Transport of `_receiver`."""
        self._receiver: WeightReceiver | None = None
        self._placements: dict[frozenset[str], SlicePlacement] = {}
        """Names of converted tensors -> where slices go: the same for every version."""
        self._checked: object = None
        """What `check` read of the last manifest that passed."""
        self._wider: dict[str, str] = {}
        """Name -> type of the tensors that are converted, in the last version that passed `check`."""
        self._live_wider: dict[str, str] = {}
        """What `_wider` was for the version that was taken last."""
        self._fetching = False
        self._cancelled = threading.Event()

    @property
    def staged(self) -> Served | None:
        """The version that is complete and verified in the copy; None if there is none."""
        return self._staged

    def check(self, manifest: WeightManifest) -> None:
        """Compare a manifest with what this engine expects, before anything is fetched.

        A layout that passed is not compared again in the next version. An engine that does not draft by a
        trained head leaves its tensors out.

        Raises:
            UnfitVersion: naming the first tensor that is missing, unknown or of another shape, or of a dtype
                that is not converted.
            WeightError: a name occurs twice.
        """
        known = (layout_digest(manifest), manifest.base_model, self.elsewhere)
        if self._checked != known:
            self._wider = self._compared(manifest)
            self._checked = known

    def _compared(self, manifest: WeightManifest) -> dict[str, str]:
        """Carry out `check`; return what `_wider` is for this version."""
        version, wider = manifest.version, dict[str, str]()
        if manifest.base_model and self._architecture and manifest.base_model != self._architecture:
            raise UnfitVersion(
                f"version {version} is of a {manifest.base_model}, the engine runs a {self._architecture}"
            )
        entries = {entry.name: entry for entry in manifest.tensors}
        if len(entries) != len(manifest.tensors):
            raise WeightError(f"version {version}: a tensor occurs twice in the manifest")
        for name, source in self._sources.items():
            entry = entries.get(name)
            if entry is None:
                raise UnfitVersion(f"version {version} lacks tensor {name}")
            is_wider = (entry.dtype, source.dtype) in self.widenings
            if entry.shape != source.shape or not (is_wider or entry.dtype == source.dtype):
                raise UnfitVersion(
                    f"tensor {name} is {entry.dtype}{list(entry.shape)}, "
                    f"the engine's {name} is {source.dtype}{list(source.shape)}"
                )
            if is_wider:
                wider[name] = entry.dtype
        named = entries if has_head(self._sources) else without_head(entries)
        unknown = sorted(named.keys() - self._sources.keys() - self.elsewhere)
        if unknown:
            hint = " (its embeddings are tied)" if self._tied else ""
            raise UnfitVersion(f"version {version}: the engine has no place for tensor {unknown[0]}{hint}")
        return wider

    def fetch(self, manifest: WeightManifest, deadline_s: float) -> int:
        """Fill the copy with a version; blocks.

        With a provisional manifest (`protocol/weights/provisional.py`) the bytes that arrive are staged under
        the digest that they have.

        Returns: bytes that were verified and placed.

        Raises:
            WeightError: the copy is empty again.
        """
        self._staged = None
        self.check(manifest)
        receiver = self._receiver_of(manifest)
        self._fetching = True
        try:
            with torch.no_grad():
                self._place(receiver, manifest, deadline_s)
        except BaseException:
            receiver.close()
            raise
        finally:
            self._fetching = False
            self._cancelled.clear()
        self._staged = Served(manifest.epoch, manifest.version, receiver.digest)
        return sum(entry.nbytes for entry in manifest.tensors)

    def _place(self, receiver: WeightReceiver, manifest: WeightManifest, deadline_s: float) -> None:
        """Receive and place what this rank has a place for."""
        wider = frozenset(self._wider)
        placement = self._placements.pop(wider, None) or self._placement()
        for found in receiver.slices(manifest, placement.wanted, deadline_s, placement.destination):
            self._refuse_cancelled(manifest)
            placement.place((part.entry.name, part.box, part.tensor) for part in found)
        placement.finish()
        self._placements[wider] = placement  # one that failed may be half filled

    def _placement(self) -> SlicePlacement:
        """Return a placement for the slices of versions."""
        return SlicePlacement(self._sources, self._wider)

    def _refuse_cancelled(self, manifest: WeightManifest) -> None:
        if self._cancelled.is_set():
            raise WeightError(f"staging of version {manifest.version} was cancelled")

    def cancel(self) -> None:
        """Make a fetch that runs or is about to begin end soon with WeightError; for other threads."""
        self._cancelled.set()
        if self._fetching and self._receiver is not None:
            self._receiver.close()

    def close(self) -> None:
        """Release the resources that the transport keeps for the next version."""
        if self._receiver is not None:
            self._receiver.close()

    def _receiver_of(self, manifest: WeightManifest) -> WeightReceiver:
        """Return the receiver of the last version, which may still be connected, or a new one."""
        if self._receiver is None or self._transport != manifest.transport:
            self.close()
            self._receiver, self._transport = self._make_receiver(manifest.transport), manifest.transport
        return self._receiver

    def _make_receiver(self, transport: str) -> WeightReceiver:
        """Return a new receiver."""
        return make_receiver(transport)

    def take(self, manifest: WeightManifest) -> Served:
        """Take the staged version for a commit; the copy counts as empty from then on.

        Raises:
            WeightError: if `manifest` is not the staged version.
        """
        if self._staged != Served(manifest.epoch, manifest.version, manifest.digest):
            staged = (
                f"version {self._staged.version} of epoch {self._staged.epoch}" if self._staged else "nothing"
            )
            raise WeightError(
                f"version {manifest.version} of epoch {manifest.epoch} is not staged ({staged} is)"
            )
        taken, self._staged = self._staged, None
        self._live_wider = self._wider
        return taken

    def live_digest(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Return the digest that a manifest of live tensors would have, in the types of the live version.

        Args:
            tensors: by checkpoint name, made one by one.
        """
        return digest_one_by_one((name, narrowed(one, self._live_wider.get(name))) for name, one in tensors)

    def discard(self) -> None:
        """Discard the staged version, and forget a `cancel` that came too late for its fetch."""
        self._staged = None
        self._cancelled.clear()


def copy_over(live: Mapping[str, torch.Tensor], copy: Mapping[str, torch.Tensor]) -> None:
    """Copy staged parameters over the live ones, by the same names."""
    targets, sources = list(live.values()), [copy[name] for name in live]
    with torch.no_grad():
        torch._foreach_copy_(targets, sources, non_blocking=True)
    if any(target.is_cuda and not source.is_cuda for target, source in zip(targets, sources, strict=True)):
        torch.cuda.current_stream().synchronize()  # the next version is written to the host's copy


def stored_once(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return parameters by name, each storage once: of tied parameters the first name stays."""
    first_names: dict[tuple[object, ...], str] = {}
    copies: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        key = (storage_key(tensor), tensor.storage_offset(), tuple(tensor.shape))
        if tensor.numel() and first_names.setdefault(key, name) != name:
            continue
        copies[name] = tensor.detach()
    return copies


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that tensors of one storage share; on `meta` they have no address."""
    storage = tensor.untyped_storage()
    return storage._cdata if tensor.is_meta else storage.data_ptr()


def whole_source(target: torch.Tensor) -> ExpectedTensor:
    """Expect a tensor that fills the dense `target` as it is."""
    shape = tuple(target.shape)
    return ExpectedTensor(
        dtype_name(target.dtype), shape, (Slice(0, shape, contiguous_stride(shape), target),)
    )


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a dense row-major tensor."""
    return torch.empty(tuple(shape), device="meta").stride()


def narrowed(tensor: torch.Tensor, dtype: str | None) -> torch.Tensor:
    """Return a tensor that was converted from `dtype` in that type; itself if it holds any other value."""
    if dtype is None:
        return tensor
    found: torch.Tensor = tensor.to(getattr(torch, dtype))
    return found if torch.equal(bits_of(found.to(tensor.dtype)), bits_of(tensor)) else tensor


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as in manifests, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def digest_of(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the digest that a manifest of exactly these tensors would have."""
    return digest_one_by_one(tensors.items())


def digest_one_by_one(tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Return the same of tensors that are made one by one, and released when they have been read."""
    digests, facts = Digests(), []
    for name, tensor in tensors:
        facts.append((name, dtype_name(tensor.dtype), tuple(tensor.shape), 0, 0, tensor.nbytes))
        digests.add(tensor)
    return manifest_digest(
        [TensorEntry(*fact, number) for fact, number in zip(facts, digests.numbers(), strict=True)]
    )
