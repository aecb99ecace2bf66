"""Tests since when a process is a service."""

import time

import psutil
import pytest

from services.runtime import start_time


def test_a_process_is_a_service_since_its_start_or_since_it_became_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(start_time, "_since", None)
    before = time.time()
    age_s = before - psutil.Process().create_time()
    assert start_time.seconds_since_start() >= age_s
    start_time.begin_now()
    assert 0 <= start_time.seconds_since_start() <= time.time() - before
