"""When the ingest warns that the ledger's wall clock jumped."""

import logging

import pytest

from services.ingest.clock_watch import JUMP_S, ClockWatch


class Clocks:
    """The server's wall clock, and the monotonic one of the process."""

    def __init__(self) -> None:
        self.wall_s, self.now_s, self.answer_s = 1.8e9, 5.0, 0.0

    async def wall_ms(self) -> int:
        self.pass_s(self.answer_s)
        return int(self.wall_s * 1000)

    def pass_s(self, seconds: float) -> None:
        self.wall_s += seconds
        self.now_s += seconds


@pytest.mark.parametrize(("jump_s", "said"), [(86_400, "ahead"), (-86_400, "back"), (-61, "back")])
async def test_a_jump_is_warned_of_once(jump_s: float, said: str, caplog: pytest.LogCaptureFixture) -> None:
    clocks = Clocks()
    watch = ClockWatch(clocks.wall_ms, lambda: clocks.now_s)
    with caplog.at_level(logging.WARNING):
        assert await watch.compare() == 0
        clocks.pass_s(5)
        clocks.wall_s += jump_s
        assert await watch.compare() == pytest.approx(jump_s)
        clocks.pass_s(5)
        assert await watch.compare() == pytest.approx(0)
    (warning,) = caplog.messages
    assert f"ledger.clock_jumped seconds={jump_s:+.0f}" in warning
    assert said in warning


async def test_time_that_passes_and_slow_answers_are_no_jump(caplog: pytest.LogCaptureFixture) -> None:
    clocks = Clocks()
    watch = ClockWatch(clocks.wall_ms, lambda: clocks.now_s)
    with caplog.at_level(logging.WARNING):
        for answer_s in (0.0, 0.0, 3 * JUMP_S, 0.0):
            clocks.answer_s = answer_s
            clocks.pass_s(3600)
            await watch.compare()
    assert caplog.messages == []
