"""Tests locks of pages: what is locked, refused and unlocked, by the kernel's own account."""

from pathlib import Path

import pytest
import torch

from protocol.device.page_locks import LockCalls, PageLocks
from tests.protocol.device.page_calls import kernel_calls, locked_kib

CPU = torch.device("cpu")
PAGES = 3 * 4096


def mapped(path: Path) -> torch.Tensor:
    """Return the memory of a new file of three pages."""
    path.write_bytes(bytes(PAGES))
    return torch.from_file(str(path), shared=True, size=PAGES, dtype=torch.uint8)


def test_storage_of_a_tensor_is_locked_once_and_unlocked_in_a_thread(tmp_path: Path) -> None:
    locks, whole = PageLocks(CPU, kernel_calls()), mapped(tmp_path / "a")
    assert locks.lock(whole[:10])
    assert locks.lock(whole[5000:])
    assert locks.holds(whole)
    assert locks.nbytes == PAGES
    assert locked_kib(tmp_path) == PAGES >> 10
    locks.unlock()
    assert locks.wait(10)
    assert not locks.holds(whole)
    assert locks.nbytes == 0
    assert locked_kib(tmp_path) == 0
    assert locks.lock(whole)  # once more


def test_unlocked_memory_is_let_go_of(tmp_path: Path) -> None:
    locks = PageLocks(CPU, kernel_calls())
    for name in "ab":
        assert locks.lock(mapped(tmp_path / name))  # nothing else refers to it
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    locks.unlock()
    assert locks.wait(10)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_refused_lock_leaves_the_others_locked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    locks = PageLocks(CPU, kernel_calls(limit=1, refused=12))
    first, second = mapped(tmp_path / "a"), mapped(tmp_path / "b")
    assert locks.lock(first)
    assert not locks.lock(second)
    assert caplog.messages == ["device.pages_not_locked error=12 locked_mib=0"]
    assert locks.holds(first)
    assert not locks.holds(second)
    assert locked_kib(tmp_path / "a") == PAGES >> 10


def test_call_that_raises_is_reported_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls, failed = kernel_calls(), list[int]()

    def unlock(address: int) -> int:
        error = calls.unlock(address)
        if not failed:
            failed.append(address)
            raise RuntimeError("invalid argument")
        return error

    locks = PageLocks(CPU, LockCalls(calls.lock, unlock))
    for name in "ab":
        assert locks.lock(mapped(tmp_path / name))
    locks.unlock()
    assert locks.wait(10)
    assert caplog.messages == ["device.pages_not_unlocked error=invalid argument"]
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_nothing_is_locked_without_cuda(tmp_path: Path) -> None:
    locks, whole = PageLocks(CPU), mapped(tmp_path / "a")
    assert not locks.lock(whole)
    assert not locks.holds(whole)
    locks.unlock()
    assert locks.wait(0)
