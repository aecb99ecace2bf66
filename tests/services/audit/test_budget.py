"""Tests the time that an audit may take, and that it leaves torch's threads to the others."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from services.audit.budget import Budget, compute_alone


def test_budget_grows_with_the_time_and_lets_what_was_taken_be_saved_up() -> None:
    now = [0.0]
    budget = Budget(0.01, lambda: now[0])
    assert (budget.covers(), budget.covers(0.001)) == (True, False)
    now[0] = 100.0
    assert (budget.covers(1.0), budget.covers(1.01)) == (True, False)
    budget.charge(3.0)
    assert not budget.covers()
    now[0] = 301.0
    assert budget.covers()


def test_time_of_the_thread_is_noted_once() -> None:
    budget = Budget(1.0)

    def noted() -> float:
        budget.note_thread()
        sum(range(1_000_000))
        budget.note_thread()
        return budget.spent_s

    with ThreadPoolExecutor(1) as thread:
        first, second = (thread.submit(noted).result() for _ in range(2))
    assert 0 < first < second


def test_thread_computes_alone_and_others_as_before() -> None:
    before = torch.get_num_threads()

    def threads_of_a_new_thread(given: Callable[[], None] = lambda: None) -> int:
        found: list[int] = []
        thread = threading.Thread(target=lambda: (given(), found.append(torch.get_num_threads())))
        thread.start()
        thread.join()
        return found[0]

    torch.set_num_threads(3)
    try:
        assert threads_of_a_new_thread(compute_alone) == 1
        assert torch.get_num_threads() == 3
        assert threads_of_a_new_thread() == 3
    finally:
        torch.set_num_threads(before)
