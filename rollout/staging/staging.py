"""Fetches weight versions into a staging copy with the layout of the live parameters."""

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
"""(dtype in a version, dtype in an engine) pairs that are converted; they need no rounding."""


class Committable(Protocol):
    """Live weights that a staged version can be copied into."""

    def apply(self) -> None:
        """Copy the version returned by the last `take` over the live weights.

        Performs no communication and, if there is a staging copy, no I/O and no device allocation.
        """


@dataclass(frozen=True, slots=True)
class LiveAndStaged:
    """Live parameters and their equally named staging copy, on one device or with the copy on the host."""

    live: dict[str, torch.Tensor]
    copy: dict[str, torch.Tensor]

    def apply(self) -> None:
        """Copy the staging copy over the live parameters."""
        copy_over(self.live, self.copy)


class Staging:
    """Staging copy of one version at a time; the next fetch discards it.

    States: empty -> (fetch) -> staged -> (take) -> empty. A failed fetch leaves it empty.

    Some engines keep a few parameters in float32 regardless of the model's dtype, such as expert biases or
    decays of gated delta nets. A 16-bit tensor of a version is converted when placed, and digested as
    published.
    """

    widenings = WIDENINGS
    """Supported conversions; empty if the engine computes with the version's own memory."""

    def __init__(
        self, sources: Mapping[str, ExpectedTensor], *, architecture: str = "", tied: bool = False
    ) -> None:
        """Expect versions of these tensors.

        Args:
            sources: checkpoint name -> expected tensor.
            architecture: class name of the model in transformers; empty: any.
            tied: whether input and output embeddings are tied in this engine.
        """
        self._sources = sources
        self._architecture = architecture
        self._tied = tied
        self.owned_by_others: Set[str] = frozenset()
        """Tensors of a version that belong only to other ranks, such as their experts."""
        self._staged: Served | None = None
        self._transport = ""
        """Transport of `_receiver`."""
        self._receiver: WeightReceiver | None = None
        self._placements: dict[frozenset[str], SlicePlacement] = {}
        """Converted names -> placement, reused for every version."""
        self._checked: object = None
        """Inputs of the last successful `check`."""
        self._wider: dict[str, str] = {}
        """Name -> dtype of converted tensors, in the last version that passed `check`."""
        self._live_wider: dict[str, str] = {}
        """Value of `_wider` for the last taken version."""
        self._fetching = False
        self._cancelled = threading.Event()

    @property
    def staged(self) -> Served | None:
        """Complete and verified version in the copy; None if there is none."""
        return self._staged

    def check(self, manifest: WeightManifest) -> None:
        """Check a manifest against the expected tensors, before anything is fetched.

        A layout that passed is not compared again. An engine without a trained draft head ignores the head's
        tensors.

        Raises:
            UnfitVersion: a tensor is missing or unknown, or has another shape or an unsupported dtype; the
                message names the first one.
            WeightError: a name occurs twice.
        """
        known = (layout_digest(manifest), manifest.base_model, self.owned_by_others)
        if self._checked != known:
            self._wider = self._compared(manifest)
            self._checked = known

    def _compared(self, manifest: WeightManifest) -> dict[str, str]:
        """Run `check`; return the value of `_wider` for this version."""
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
        unknown = sorted(named.keys() - self._sources.keys() - self.owned_by_others)
        if unknown:
            hint = " (its embeddings are tied)" if self._tied else ""
            raise UnfitVersion(
                f"version {version}: the engine has no parameter for tensor {unknown[0]}{hint}"
            )
        return wider

    def fetch(self, manifest: WeightManifest, deadline_s: float) -> int:
        """Fill the copy with a version; blocks.

        With a provisional manifest (`protocol/weights/provisional.py`), arriving bytes are staged under the
        digest that they have.

        Returns: number of verified and placed bytes.

        Raises:
            WeightError: fetching failed; the copy is empty again.
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
        """Receive and place the slices that this rank needs."""
        wider = frozenset(self._wider)
        placement = self._placements.pop(wider, None) or self._placement()
        for found in receiver.slices(manifest, placement.wanted, deadline_s, placement.destination):
            self._refuse_cancelled(manifest)
            placement.place((part.entry.name, part.box, part.tensor) for part in found)
        placement.finish()
        self._placements[wider] = placement  # a failed placement may be half filled and is not reused

    def _placement(self) -> SlicePlacement:
        """Return a placement for the slices of versions."""
        return SlicePlacement(self._sources, self._wider)

    def _refuse_cancelled(self, manifest: WeightManifest) -> None:
        if self._cancelled.is_set():
            raise WeightError(f"staging of version {manifest.version} was cancelled")

    def cancel(self) -> None:
        """Let a running or starting fetch end soon with WeightError; callable from other threads."""
        self._cancelled.set()
        if self._fetching and self._receiver is not None:
            self._receiver.close()

    def close(self) -> None:
        """Release the resources that the transport keeps for the next version."""
        if self._receiver is not None:
            self._receiver.close()

    def _receiver_of(self, manifest: WeightManifest) -> WeightReceiver:
        """Return the last version's receiver, which may still be connected, or a new one."""
        if self._receiver is None or self._transport != manifest.transport:
            self.close()
            self._receiver, self._transport = self._make_receiver(manifest.transport), manifest.transport
        return self._receiver

    def _make_receiver(self, transport: str) -> WeightReceiver:
        """Return a new receiver."""
        return make_receiver(transport)

    def take(self, manifest: WeightManifest) -> Served:
        """Take the staged version for a commit; the copy then counts as empty.

        Raises:
            WeightError: `manifest` is not the staged version.
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
        """Return the digest of a manifest of live tensors, in the dtypes of the live version.

        Args:
            tensors: (checkpoint name, tensor) pairs, created one by one.
        """
        return digest_one_by_one((name, narrowed(one, self._live_wider.get(name))) for name, one in tensors)

    def discard(self) -> None:
        """Discard the staged version, and clear a `cancel` that came too late for its fetch."""
        self._staged = None
        self._cancelled.clear()


def copy_over(live: Mapping[str, torch.Tensor], copy: Mapping[str, torch.Tensor]) -> None:
    """Copy staged parameters over the live ones of the same names."""
    targets, sources = list(live.values()), [copy[name] for name in live]
    with torch.no_grad():
        torch._foreach_copy_(targets, sources, non_blocking=True)
    if any(target.is_cuda and not source.is_cuda for target, source in zip(targets, sources, strict=True)):
        torch.cuda.current_stream().synchronize()  # the next version overwrites the host copy


def stored_once(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return parameters by name, each storage once; tied parameters keep the first name."""
    first_names: dict[tuple[object, ...], str] = {}
    copies: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        key = (storage_key(tensor), tensor.storage_offset(), tuple(tensor.shape))
        if tensor.numel() and first_names.setdefault(key, name) != name:
            continue
        copies[name] = tensor.detach()
    return copies


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that identifies a tensor's storage; tensors on `meta` have no address."""
    storage = tensor.untyped_storage()
    return storage._cdata if tensor.is_meta else storage.data_ptr()


def whole_source(target: torch.Tensor) -> ExpectedTensor:
    """Expect a whole tensor that fills the dense `target`."""
    shape = tuple(target.shape)
    return ExpectedTensor(
        dtype_name(target.dtype), shape, (Slice(0, shape, contiguous_stride(shape), target),)
    )


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a dense row-major tensor, elements."""
    return torch.empty(tuple(shape), device="meta").stride()


def narrowed(tensor: torch.Tensor, dtype: str | None) -> torch.Tensor:
    """Return a converted tensor in its original `dtype`; the tensor itself if the conversion is not exact."""
    if dtype is None:
        return tensor
    found: torch.Tensor = tensor.to(getattr(torch, dtype))
    return found if torch.equal(bits_of(found.to(tensor.dtype)), bits_of(tensor)) else tensor


def dtype_name(dtype: torch.dtype) -> str:
    """Return the manifest name of a dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def digest_of(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the digest of a manifest of exactly these tensors."""
    return digest_one_by_one(tensors.items())


def digest_one_by_one(tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Return `digest_of` for tensors that are created one by one and released after reading."""
    digests, facts = Digests(), []
    for name, tensor in tensors:
        facts.append((name, dtype_name(tensor.dtype), tuple(tensor.shape), 0, 0, tensor.nbytes))
        digests.add(tensor)
    return manifest_digest(
        [TensorEntry(*fact, number) for fact, number in zip(facts, digests.numbers(), strict=True)]
    )
