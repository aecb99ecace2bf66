"""A worker whose sessions need more open files than it may have says so, and what to do."""

import resource

import pytest

from protocol.errors import SettingsError
from services.rollout.open_files import RESERVED, check_open_files


def test_too_few_open_files_are_refused_with_both_remedies() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    groups = soft  # as many connections as there are files in all
    with pytest.raises(SettingsError, match=rf"may have {soft}.*ulimit -n {RESERVED + 2 * groups}`.*lower"):
        check_open_files(groups, 2, 1)


def test_samples_without_connections_need_no_files() -> None:
    check_open_files(10**6, 10**5, 0)
    check_open_files(1, 8, 3)
