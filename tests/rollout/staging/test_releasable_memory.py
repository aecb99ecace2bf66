"""Tests release and restore of tensors' storages, and the check for room."""

import pytest
import torch

from protocol.errors import EngineError
from rollout.staging.releasable_memory import ReleasableMemory, check_room


def test_released_tensors_stay_the_same_objects_and_kept_ones_their_values() -> None:
    dropped, kept = torch.arange(12.0), torch.randn(7)
    view, before = kept[2:5], kept.clone()
    memory = ReleasableMemory([dropped, dropped[3:]], [kept, view, dropped])
    for _ in range(2):
        memory.release()
        memory.release()
        assert dropped.untyped_storage().nbytes() == kept.untyped_storage().nbytes() == 0
        memory.restore()
        memory.restore()
        assert torch.equal(kept, before)
        assert torch.equal(view, before[2:5])
        dropped.copy_(torch.arange(12.0))
        assert dropped[3:].tolist() == list(range(3, 12))


def test_copy_over_staging_mb_is_refused_with_both_numbers() -> None:
    parameters = [torch.empty(3 << 20, dtype=torch.uint8)]
    check_room(parameters, 0)
    check_room(parameters, 3)
    with pytest.raises(EngineError, match=r"engine.staging_mb is 2, a copy of the parameters takes 3 MiB"):
        check_room(parameters, 2)


def test_copy_without_room_is_refused_before_it_is_allocated() -> None:
    huge = torch.empty(1, dtype=torch.uint8).expand(1 << 50)
    with pytest.raises(
        EngineError, match=r"staging takes 1073741824 MiB .* MiB are free on cpu: lower engine.kv_cache_mb"
    ):
        check_room([huge], 0)
