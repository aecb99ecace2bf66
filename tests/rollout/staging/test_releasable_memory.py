from collections.abc import Iterator

import pytest
import torch

from protocol.errors import EngineError
from rollout.staging.loader_trace import trace
from rollout.staging.rank import RankStaging
from rollout.staging.releasable_memory import ReleasableMemory, check_room


def test_dropped_and_kept_tensors_are_the_same_objects_afterwards_and_kept_ones_have_their_values() -> None:
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


def test_a_copy_that_may_not_be_so_large_is_refused_with_both_numbers() -> None:
    parameters = [torch.empty(3 << 20, dtype=torch.uint8)]
    check_room(parameters, 0)
    check_room(parameters, 3)
    with pytest.raises(EngineError, match=r"engine.staging_mb is 2, a copy of the parameters takes 3 MiB"):
        check_room(parameters, 2)


def test_a_copy_for_which_there_is_no_memory_is_refused_before_it_is_allocated() -> None:
    huge = torch.empty(1, dtype=torch.uint8).expand(1 << 50)
    with pytest.raises(
        EngineError, match=r"staging takes 1073741824 MiB .* MiB are free on cpu: lower engine.kv_cache_mb"
    ):
        check_room([huge], 0)


def test_a_part_of_the_weights_can_be_given_back_after_its_digest_was_taken() -> None:
    live = torch.zeros(2, 3)

    def load(named: Iterator[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in named:
            live.copy_(tensor[2:])

    share = RankStaging(trace(load, [("w", live)], {"w": (4, 3)}, torch.float32), architecture="", tied=False)
    whole, before = share.live_digest()
    live.fill_(1)
    assert not whole
    assert share.live_digest()[1] != before
    ReleasableMemory([live]).release()
    assert not live.untyped_storage().nbytes()
