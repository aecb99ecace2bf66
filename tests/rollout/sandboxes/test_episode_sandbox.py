"""An episode's sandbox starts with its first command."""

from pathlib import Path

from tests.contracts.host_sandbox_suite import play


async def test_an_episode_without_commands_has_no_sandbox(tmp_path: Path) -> None:
    record = tmp_path / "record"
    assert await play("tests.rollout.sandboxes.test_bubblewrap:made", str(record), [], 1) == []
    assert not record.exists()
