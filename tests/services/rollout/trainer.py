"""Plays the trainer in a weight history: real ledger transitions, senders, broadcaster, and crashes."""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path

import torch

from protocol.codec import encode_payload
from protocol.errors import Refused
from protocol.messages import WeightManifest
from protocol.staleness import Bound, Policy, trainable_counts
from protocol.topics import WEIGHTS
from services.bus.broadcast import Broadcaster
from services.ledger.interface import RunSpec, TakenBatch
from tests.contracts.memory_ledger.ledger import MemoryLedger
from tests.services.bus.harness import RUN, Registry
from tests.services.bus.history import CONFIG
from tests.services.bus.middle import Middle
from tests.services.rollout.versions import Versions, Weights
from tests.trainer.weights.senders import sender_of
from trainer.config import WeightConfig
from trainer.weights.base import WeightSender
from trainer.weights.shared import SharedSender

TAKE_TRIES = 100
DAMAGE = ("", "corrupt", "truncate", "remove", "swap")


class Dying(Exception):
    """Raised where the trainer's process ends."""


class Trainer:
    """Successive lives of the trainer.

    `branch[v]` are the weights of version v on the branch that the ledger is on.
    """

    def __init__(
        self, transport: str, directory: Path, ledger: MemoryLedger, registry: Registry, versions: Versions
    ) -> None:
        self._ledger = ledger
        self._registry = registry
        self._versions = versions
        self._config = WeightConfig(transport=transport, bucket_mb=1, timeout_s=5.0)
        self._directory = directory
        self._lives = 0
        self._senders: list[WeightSender] = []
        self._stack = AsyncExitStack()
        self._casters: list[tuple[str, Broadcaster, WeightManifest | None]] = []
        self.middle: Middle | None = None
        self.epoch = ""
        self.branch: list[Weights] = [versions.new()]
        self.published: dict[int, list[Weights]] = {0: list(self.branch)}
        """Every version that was ever published, also on branches that were abandoned."""
        self.manifest: WeightManifest | None = None

    async def begin(self) -> None:
        await self._ledger.create(
            RunSpec(
                run=RUN,
                fingerprint="f",
                prompts=None,
                steps=10_000,
                bound=Bound(20, 1, Policy.MASK),
                max_attempts=10_000,
            )
        )
        await self.restart(0)

    async def restart(self, back: int = 0, *, zombie: bool = False) -> None:
        """End the trainer at once; the next one continues, or goes back `back` versions.

        A zombie continues to send.
        """
        await self._end(zombie=zombie)
        self._lives += 1
        self.epoch = f"e{self._lives}"
        config = replace(self._config, directory=str(self._directory / self.epoch))
        self._masters = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in self.branch[0].items()}
        directory = self._directory / self.epoch
        self._senders.append(
            SharedSender(directory, self._masters)
            if config.transport == "shared"
            else sender_of(config, self.branch[0].items(), directory, RUN)
        )
        await self._bind()
        status = await self._ledger.claim(self.epoch)
        version = max(0, status.version - back)
        manifest = await self._publish(version, self.branch[version])
        await self._ledger.resume(self.epoch, version, manifest.digest)
        del self.branch[version + 1 :]
        await self._ledger.publish(self.epoch, encode_payload(manifest), version)
        self._say(manifest)

    async def step(self, *, damage: str = "", dies: str = "") -> None:
        """Commit a version, if a group is scored soon.

        Args:
            damage: to what was published. "swap": something else is made first under the version's name.
            dies: while it is "writing", or after it has "written" or "committed".
        """
        taken = await self._take()
        if taken is None:
            return
        version, weights = taken.step + 1, self._versions.new()
        await self._draft(version)
        if damage == "swap":
            await self._publish(version, self._versions.new(), known=False)
        if dies == "writing":
            try:
                await self._publish(version, weights, until=len(weights) // 2)
            except Dying:
                await self.restart()
            return
        manifest = await self._publish(version, weights)
        _spoil(manifest, damage)
        if damage == "corrupt" and manifest.transport == "shared":
            _write(self._masters, self._versions.new())
        if dies == "written":
            await self.restart()
            return
        trained = {
            group.group: trainable_counts(taken.step, group.counts, group.max_staleness)
            for group in taken.groups
        }
        await self._ledger.commit(
            self.epoch, taken.step, trained, digest=manifest.digest, report=b"",
            manifest=encode_payload(manifest)
        )  # fmt: skip
        self.branch.append(weights)
        if dies == "committed":
            await self.restart()
        else:
            self._say(manifest)

    async def _take(self) -> TakenBatch | None:
        """Return the next batch; None if there is none for a while, because no engine serves anything."""
        for _ in range(TAKE_TRIES):
            with suppress(Refused):
                return await self._ledger.take(self.epoch)
            await asyncio.sleep(0.002)
        return None

    def haunt(self) -> None:
        """Let former trainers that are zombies publish their last manifest again."""
        for epoch, caster, manifest in self._casters[:-1]:
            if manifest is not None:
                caster.publish(manifest, epoch=epoch)

    async def close(self) -> None:
        await self._end(zombie=False)
        await self._stack.aclose()

    def _say(self, manifest: WeightManifest) -> None:
        self.manifest = manifest
        epoch, caster, _ = self._casters[-1]
        self._casters[-1] = (epoch, caster, manifest)
        caster.publish(manifest, epoch=epoch)

    async def _bind(self) -> None:
        name = f"trainer.{self._lives}"
        caster = Broadcaster(WEIGHTS, run=RUN, incarnation=name, config=CONFIG)
        await self._stack.enter_async_context(caster)
        self.middle = await self._stack.enter_async_context(Middle(caster.endpoint).running())
        self._registry[name] = self.middle.endpoint
        self._casters.append((self.epoch, caster, None))

    async def _end(self, *, zombie: bool) -> None:
        if not zombie:
            for sender in self._senders:
                await asyncio.to_thread(sender.close)
            self._senders.clear()
            self._registry.clear()
            self._casters.clear()
            await self._stack.aclose()

    async def _draft(self, version: int) -> None:
        """Let engines receive the version while it is made, if the transport can."""
        sender = self._senders[-1]
        coming = sender.provisional(self.epoch, version)
        if coming is not None:
            self._casters[-1][1].publish(coming, epoch=self.epoch)
            await asyncio.sleep(0.002)  # so that some are asked for it before it is complete, as in a run

    async def _publish(
        self, version: int, weights: Weights, *, until: int = 1000, known: bool = True
    ) -> WeightManifest:
        def export() -> Iterator[tuple[str, torch.Tensor]]:
            for number, item in enumerate(weights.items()):
                if number == until:
                    raise Dying
                yield item

        def publish() -> WeightManifest:
            sender, masters = self._senders[-1], self._masters
            if isinstance(
                sender, SharedSender
            ):  # as a step does it, but for that this trainer waits for no engine
                sender.invalidate()
                _write(masters, weights)
            return sender.publish(self.epoch, version, export(), base_model="Qwen2ForCausalLM")

        if known:
            self.published.setdefault(version, []).append(weights)
        return await asyncio.to_thread(publish)


@torch.no_grad()
def _write(masters: Weights, weights: Weights) -> None:
    for name, tensor in weights.items():
        masters[name].copy_(tensor)


def _spoil(manifest: WeightManifest, damage: str) -> None:
    """Damage the files of a published version."""
    directory = Path(manifest.location)
    if not damage or not directory.is_dir():
        return
    path = next(path for path in sorted(directory.iterdir()) if path.suffix in (".bin", ".safetensors"))
    data = bytearray(path.read_bytes())
    path.unlink()  # an engine that has it mapped keeps what it has
    if damage == "corrupt":
        data[-1 - len(data) // 3] ^= 1
    if damage != "remove":
        path.write_bytes(data[: -1 if damage == "truncate" else None])
