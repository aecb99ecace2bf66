"""The environment of processes that this one starts."""

import os
import subprocess
import sys
from contextlib import suppress

import pytest

from protocol.host.child_environment import ROOT, child_environment, with_variables


def test_settings_and_withheld_variables_are_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TETHER_REDIS_URL", "redis://:secret@host")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("RANKED", "yes")
    found = child_environment({"TETHER_OWNER": "7"}, without={"RANK"})
    assert "TETHER_REDIS_URL" not in found
    assert "RANK" not in found
    assert (found["RANKED"], found["TETHER_OWNER"]) == ("yes", "7")


def test_our_packages_are_searched_before_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/inherited")
    found = child_environment({"PYTHONPATH": "/given"}, first=["/first"])
    assert found["PYTHONPATH"].split(os.pathsep) == ["/first", ROOT, "/given", "/inherited"]
    monkeypatch.delenv("PYTHONPATH")
    where = "import protocol, pathlib; print(pathlib.Path(protocol.__file__).parents[1])"
    command = [sys.executable, "-P", "-c", where]
    said = subprocess.run(command, env=child_environment(), cwd="/", check=True, capture_output=True)
    assert said.stdout.decode().strip() == ROOT


def test_variables_are_as_before_after_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAD", "old")
    monkeypatch.delenv("HAD_NOT", raising=False)
    with suppress(ValueError), with_variables({"HAD": "", "HAD_NOT": "1"}):
        assert (os.environ["HAD"], os.environ["HAD_NOT"]) == ("", "1")
        raise ValueError
    assert os.environ["HAD"] == "old"
    assert "HAD_NOT" not in os.environ
