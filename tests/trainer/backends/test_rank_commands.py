"""How ranks wait for commands of rank 0, between real processes."""

from pathlib import Path

from tests.trainer.megatron.launch import launch


def test_queued_messages_arrive_in_order_and_the_wait_for_another_ends(tmp_path: Path) -> None:
    module = "tests.trainer.backends.queued_rank"
    launch(2, module, str(tmp_path), logs=tmp_path / "logs", deadline_s=300)
    assert (tmp_path / "got").read_text() == "True"
    assert "timeout" in (tmp_path / "late").read_text()
