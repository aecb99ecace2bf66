"""Tests release and restore of tensors' storages."""

import torch

from rollout.staging.releasable_memory import ReleasableMemory


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
