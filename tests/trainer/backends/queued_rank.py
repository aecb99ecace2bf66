"""Runs one of two ranks: rank 0 queues messages for rank 1, which writes down what it got and then waits."""

import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from trainer.backends.rank_commands import next_queued, queue_for_others

MESSAGES = (b"first", b"\0\xff\0", b"x" * 100_000)


def main(out: Path) -> None:
    """Write down the messages, and that no more came in the store's time."""
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        for message in MESSAGES:
            queue_for_others(message)
    else:
        got = [next_queued() for _ in MESSAGES]
        (out / "got").write_text(repr(got == list(MESSAGES)))
        dist.distributed_c10d._get_default_store().set_timeout(timedelta(seconds=0.2))
        try:
            next_queued()
        except RuntimeError as error:
            (out / "late").write_text(str(error))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
