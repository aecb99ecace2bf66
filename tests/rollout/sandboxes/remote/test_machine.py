"""Machines elsewhere, by doubles that need no package of a company."""

from pathlib import Path

import pytest

from rollout.programs.folder import ProgramFolder, clear_left_folders
from rollout.sandboxes.base import SandboxDied
from rollout.sandboxes.remote.machine import RemoteSandbox
from rollout.sandboxes.remote.provider import host_label
from tests.contracts.sandbox_suite import CONFIG, shell


class AnsweringMachine:
    """A machine whose every answer is the same."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    async def run(self, line: str, wall_s: float) -> str:
        return ""

    async def put(self, path: str, data: bytes) -> None:
        pass

    async def get(self, path: str) -> bytes:
        return self._answer

    async def remove(self) -> None:
        pass


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.mark.parametrize(
    "answer", [b"", b'{"ended": "", "sta', b'{"ended": "", "status": 0, "bytes": 5}\nab']
)
async def test_an_empty_or_cut_answer_is_a_dead_sandbox(answer: bytes) -> None:
    sandbox = RemoteSandbox(AnsweringMachine(answer), CONFIG, ProgramFolder())
    for why in ("incomplete reply", "state is unknown"):
        with pytest.raises(SandboxDied, match=why):
            await shell(sandbox, "true")
    await sandbox.stop()


def test_a_host_has_a_label_that_no_other_host_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    label = host_label()
    clear_left_folders()
    assert host_label() == label
    (tmp_path / "other").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "other"))
    assert host_label() != label
