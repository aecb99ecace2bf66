"""Tests which errors at the start of an engine are refusals, from the output of engines."""

import pytest
import torch

from rollout.engines.multi_process.refusals import is_refusal, refusal_in

SCHEDULER = """\
[2026-11-27 00:00:01] Scheduler hit an exception: Traceback (most recent call last):
  File "sglang/srt/managers/scheduler.py", line 1, in run_scheduler_process
    scheduler = Scheduler(server_args)
{error}

[2026-11-27 00:00:01] Received sigquit from a child process. It usually means the child failed.
"""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            "ValueError: Cannot find the config file for awq",
            "ValueError: Cannot find the config file for awq",
        ),
        ("AssertionError: Model requires one of\n ['triton']", "AssertionError: Model requires one of"),
        ("torch.OutOfMemoryError: CUDA out of memory.", ""),
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", ""),
        ("ConnectionError: the hub did not answer", ""),
        ("AssertionError", ""),
    ],
)
def test_the_refusal_in_a_log_is_its_last_error(error: str, said: str) -> None:
    log = "ImportError: handled before\n" + SCHEDULER.format(error=error)
    assert refusal_in(log) == said


IGNORED = """\
Exception ignored in: <function Cache.__del__ at 0x7f2a>
Traceback (most recent call last):
  File "sglang/cache.py", line 7, in __del__
    self.pool.close()
    ^^^^^^^^^
AttributeError: 'Cache' object has no attribute 'pool'
"""
REFUSED = "ValueError: no such format"


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (SCHEDULER.format(error="ConnectionError: the hub did not answer") + IGNORED, ""),
        (SCHEDULER.format(error="RuntimeError: CUDA error: out of memory") + IGNORED, ""),
        (SCHEDULER.format(error=REFUSED) + IGNORED, REFUSED),
        (IGNORED + REFUSED, REFUSED),
        (IGNORED.replace("in:", "while calling deallocator"), ""),
        # another rank ends for the end of the first
        ("torch.OutOfMemoryError: CUDA out of memory.\nKeyError: 'no answer of rank 1'\n", ""),
        ("RuntimeError: CUDA error: out of memory\nValueError: rank 1 has ended\n", ""),
        ("ValueError: dist_init_port at 31000 is not available in 30 seconds. process.pid=7\n", ""),
        ("ValueError: nccl_port at 31000 is used by a process already: psutil.Process(pid=7)\n", ""),
        ("ValueError: Port is already in use. dist_init_port=31000\n", ""),
        ("AssertionError: FlashInfer is not available\n", "AssertionError: FlashInfer is not available"),
    ],
)
def test_want_that_may_pass_and_errors_that_python_ignores_are_no_refusals(log: str, said: str) -> None:
    assert refusal_in(log) == said


def test_a_log_without_an_error_has_no_refusal() -> None:
    assert refusal_in("Loading weights\nInfo: ValueError is a class\n") == ""


@pytest.mark.parametrize(
    ("text", "on_a_gpu", "refused"),
    [
        ("No available memory for the cache blocks.", False, True),
        ("No available memory for the cache blocks.", True, False),
        ("Free memory on device cpu:0 (1/8 GiB) on startup is less than desired", False, False),
        ("block_size 7", True, True),
    ],
)
def test_want_of_memory_is_a_refusal_on_a_cpu_alone(
    monkeypatch: pytest.MonkeyPatch, text: str, on_a_gpu: bool, refused: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_a_gpu)
    assert is_refusal(["ValidationError", "ValueError"], text) is refused
    assert not is_refusal(["RuntimeError"], text)
