"""Death of either end during a transfer (kill -9): no other process notices, and the next update succeeds.

Once on gloo, once on two GPUs.
"""

from contextlib import ExitStack

import pytest
import torch

from tests.changes import WEIGHTS, slow_unless_changed
from tests.gpus import TWO_GPUS
from tests.trainer.weights.engines import publish, started, trainer, version_tensors
from tests.trainer.weights.receiver import COUNT
from tests.trainer.weights.senders import part_sender
from trainer.config import WeightConfig

pytestmark = slow_unless_changed(*WEIGHTS)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=TWO_GPUS)])
def test_a_receiver_killed_in_the_middle_hurts_neither_sender_nor_the_other(device: str) -> None:
    gpu = 1 if device == "cuda" else None
    with ExitStack() as stack:
        sender = part_sender(WeightConfig(transport="nccl", bucket_mb=1, timeout_s=60), version_tensors(0))
        stack.callback(sender.close)
        survivor, victim = stack.enter_context(started(gpu)), stack.enter_context(started(gpu))
        first = publish(sender, 1, device)
        survivor.serve(first)
        victim.serve(first)

        second = publish(sender, 2, device)
        assert victim.ask("hang", second) == {"came": COUNT // 2}
        survivor.tell("stage", second)
        victim.process.kill()
        assert survivor.answer() == {"staged": 2}
        assert survivor.ask("digest") == {"digest": first.digest}
        ones = torch.ones(8, 8, device=device)
        assert ones.matmul(ones).sum() == 512  # the sender's process still computes

        third = publish(sender, 3, device)
        again = stack.enter_context(started(gpu))  # its successor
        for engine in (survivor, again):
            engine.serve(third)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=TWO_GPUS)])
def test_a_trainer_killed_in_the_middle_is_an_error_at_once_and_its_successor_serves_the_engine(
    device: str,
) -> None:
    with ExitStack() as stack:
        engine = stack.enter_context(started(1 if device == "cuda" else None))
        process, (_, second) = stack.enter_context(trainer("nccl", device))
        engine.serve(second)
        engine.tell("wait", second)
        assert engine.answer() == {"came": COUNT // 2}
        process.kill()
        process.wait()
        engine.tell("go")
        assert "not complete within" not in str(engine.answer()["error"])
        sender = part_sender(WeightConfig(transport="nccl", bucket_mb=1, timeout_s=60), version_tensors(0))
        stack.callback(sender.close)
        engine.serve(publish(sender, 3, device))
