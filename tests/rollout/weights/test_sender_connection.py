"""A connection to a sender: the size of an answer."""

from contextlib import closing

import torch

from protocol.device.bucket_handles import HostBuckets
from protocol.messages import WeightManifest, WeightPart
from protocol.weights.slices import BucketSizes, encode_wanted
from rollout.weights.sender_connection import SenderConnection
from rollout.weights.verification import Deadline
from trainer.config import WeightConfig
from trainer.weights.served.ipc_handles import HandleChannel
from trainer.weights.served.version_server import ServedVersion, VersionServer

BUCKETS = 10_000
HANDLE = [0, "A" * 88, 64 << 20, 0, "A" * 60, 0, "A" * 88, True]
"""As long as one of GPU memory."""


class ManyBuckets(HostBuckets):
    """Buckets whose handles are as long as those of a GPU's memory."""

    def handle(self, bucket: torch.Tensor) -> list[object]:
        return HANDLE


def test_answer_may_describe_thousands_of_buckets() -> None:
    manifest = WeightManifest(
        epoch="e1",
        version=1,
        transport="ipc",
        location="",
        buckets=(),
        tensors=(),
        parts=(WeightPart("", ()),),
    )
    memory = torch.empty(BUCKETS, dtype=torch.uint8)
    config = WeightConfig(transport="ipc", timeout_s=60)

    def channel() -> HandleChannel:
        return HandleChannel(ManyBuckets(), 0, BucketSizes(1, 1))

    with closing(VersionServer(config, channel)) as server:
        host, _, port = server.address.rpartition(":")
        server.current = ServedVersion(manifest, tuple(memory.split(1)))
        deadline = Deadline(manifest, 60)
        with closing(SenderConnection(host, int(port), deadline)) as connection:
            answer = connection.request(manifest, deadline, encode_wanted({}))
            assert [bucket["memory"] for bucket in answer["buckets"]] == list(range(BUCKETS))
