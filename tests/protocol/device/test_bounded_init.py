"""Initialization with a deadline: what misses it is abandoned and discarded, up to a limit."""

import threading
import weakref
from collections.abc import Callable

import pytest

from protocol.device import bounded_init
from protocol.device.bounded_init import MAX_STUCK, check_stuck, init_with_deadline
from protocol.errors import PoisonedError
from tests.protocol.device.stuck import Library, stuck, until_none_is_left


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_init, "GRACE_S", 0.0)


def test_init_with_deadline_returns_the_group_or_raises_the_error() -> None:
    assert init_with_deadline(lambda hold: "group", pytest.fail, 600, lambda: False) == "group"
    with pytest.raises(RuntimeError, match="no such device"):
        init_with_deadline(
            lambda hold: (_ for _ in ()).throw(RuntimeError("no such device")),
            pytest.fail,
            600,
            lambda: False,
        )


def test_tensors_of_a_failed_call_are_discarded_and_not_kept_by_its_error() -> None:
    created: list[weakref.ref[Library]] = []
    discarded: list[int] = []

    def make(hold: Callable[[Library], None]) -> Library:
        group = Library()
        created.append(weakref.ref(group))
        hold(group)
        raise RuntimeError("the peer left")

    problem = ""
    try:
        init_with_deadline(make, lambda group: discarded.append(id(group)), 600, lambda: False)
    except RuntimeError as error:
        problem = str(error)
    until_none_is_left()
    assert problem == "the peer left"
    assert len(discarded) == 1
    assert created[0]() is None  # without a garbage collection


def test_a_late_group_is_discarded_by_its_own_thread() -> None:
    library = Library()
    with stuck(library, 2):
        assert library.discarded == []
    assert library.discarded == ["group", "group"]


def test_a_created_group_is_discarded_at_once_so_that_its_thread_returns() -> None:
    aborted = threading.Event()

    def make(hold: Callable[[str], None]) -> str:
        hold("group")
        aborted.wait()  # a collective, which ends when its group is aborted
        return "group"

    discarded: list[str] = []
    with pytest.raises(ConnectionError):
        init_with_deadline(make, lambda group: (discarded.append(group), aborted.set()), 600, lambda: True)
    until_none_is_left()
    assert set(discarded) == {"group"}


def test_a_failed_disconnect_check_abandons_the_thread() -> None:
    library = Library()

    def reset() -> bool:
        raise ConnectionResetError("reset by peer")

    with stuck(library, 0, more=1):
        with pytest.raises(ConnectionResetError):
            init_with_deadline(library.make, library.discarded.append, 600, reset)
        assert len(bounded_init._abandoned) == 1
    assert library.discarded == ["group"]


def test_a_process_tolerates_a_few_stuck_threads_and_recovers_when_they_return() -> None:
    library = Library()
    with stuck(library, MAX_STUCK - 1):
        assert init_with_deadline(lambda hold: "other", pytest.fail, 600, lambda: False) == "other"
        check_stuck()
    with stuck(Library(), MAX_STUCK):
        before = threading.active_count()
        for refused in (
            check_stuck,
            lambda: init_with_deadline(pytest.fail, pytest.fail, 600, lambda: False),
        ):
            with pytest.raises(
                PoisonedError,
                match="4 threads are stuck initializing process groups: this process must be restarted",
            ):
                refused()
        assert threading.active_count() == before
    check_stuck()


def test_an_abandoned_thread_is_not_stuck_before_its_grace_period_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bounded_init, "GRACE_S", 600.0)
    with stuck(Library(), 2 * MAX_STUCK):
        check_stuck()
