"""Buckets that processes of one host share by handles."""

import json

import pytest
import torch

from protocol.device.bucket_handles import HOST, HostBuckets, open_bucket


def test_host_bucket_is_mapped_by_a_handle_of_plain_values_until_its_owner_closes_it() -> None:
    buckets = HostBuckets()
    bucket = buckets.empty(5)
    handle = json.loads(json.dumps(buckets.handle(bucket)))
    mapped = open_bucket(HOST, handle)
    bucket.copy_(torch.arange(5, dtype=torch.uint8))
    assert mapped.tolist() == [0, 1, 2, 3, 4]
    buckets.close()
    buckets.close()
    assert mapped.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(OSError, match=r"descriptor|No such file"):
        open_bucket(HOST, handle)


def test_empty_bucket_can_be_shared() -> None:
    buckets = HostBuckets()
    assert len(open_bucket(HOST, buckets.handle(buckets.empty(0)))) == 1
    buckets.close()
