"""Tests that tensors are handed over once they are final, and never those of a step that fails."""

import threading
from collections.abc import Iterator

import pytest
import torch

from protocol.errors import WeightError
from trainer.backends.early_export import EarlyExport, Tensors

FIRST, SECOND, FROZEN = (torch.full((2,), float(number)) for number in range(3))


class Consumer:
    """Exports three tensors in a thread, as a publisher does."""

    def __init__(self, updates: int = 1) -> None:
        self.early = EarlyExport(self._begin, self._export, updates)
        self.found: list[str] = []
        self.problem = ""
        self.has_one = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def begun(self) -> bool:
        return self._thread is not None

    def join(self) -> None:
        assert self._thread is not None
        self._thread.join(60)

    def _begin(self, tensors: Tensors) -> None:
        self._thread = threading.Thread(target=self._consume, args=(tensors,))
        self._thread.start()

    def _export(self, early: EarlyExport) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in (("first", FIRST), ("second", SECOND), ("frozen", FROZEN)):
            early.await_final(tensor)
            yield name, tensor

    def _consume(self, tensors: Tensors) -> None:
        try:
            for name, _ in tensors:
                self.found.append(name)
                self.has_one.set()
        except WeightError as error:
            self.problem = str(error)


def test_tensors_that_are_final_are_handed_over_while_the_step_goes_on() -> None:
    consumer = Consumer()
    with consumer.early.step():
        consumer.early.begin()
        consumer.early.add([FIRST], None)
        assert consumer.has_one.wait(60)
        assert consumer.found == ["first"]
        consumer.early.add([SECOND], None)
    consumer.join()
    assert consumer.found == ["first", "second", "frozen"]  # what is not stepped comes after the step


def test_a_step_that_fails_ends_the_export_with_an_error() -> None:
    consumer = Consumer()

    def fail() -> None:
        with consumer.early.step():
            consumer.early.begin()
            consumer.early.add([FIRST], None)
            assert consumer.has_one.wait(60)
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        fail()
    consumer.join()
    assert (consumer.found, consumer.problem) == (["first"], "the optimizer's step has failed")


def test_a_step_that_is_skipped_begins_nothing() -> None:
    consumer = Consumer()
    with consumer.early.step():
        pass
    assert not consumer.begun


def test_parameters_are_final_in_the_last_update_alone() -> None:
    consumer = Consumer(updates=2)
    with consumer.early.step():
        consumer.early.begin()
        consumer.early.add([FIRST, SECOND], None)
        assert not consumer.begun
        consumer.early.begin()
        consumer.early.add([FIRST], None)
        assert consumer.has_one.wait(60)
        assert consumer.found == ["first"]
    consumer.join()
    assert consumer.found == ["first", "second", "frozen"]


def test_an_update_that_is_skipped_leaves_the_export_to_the_end() -> None:
    consumer = Consumer(updates=2)
    with consumer.early.step():
        consumer.early.begin()
    assert not consumer.begun


def test_an_update_after_the_last_one_is_refused() -> None:
    consumer = Consumer()

    def twice() -> None:
        with consumer.early.step():
            consumer.early.begin()
            consumer.early.begin()

    with pytest.raises(RuntimeError, match="parameters that are being published"):
        twice()
    consumer.join()
    assert consumer.found == []


def test_without_a_consumer_steps_are_not_counted() -> None:
    early = EarlyExport()
    for _ in range(2):
        with early.step():
            early.begin()
            early.add([FIRST], None)
