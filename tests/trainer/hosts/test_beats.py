"""Tests which hosts count as silent."""

from trainer.hosts.beats import Beats


def test_a_host_that_never_beats_is_silent_after_the_limit() -> None:
    beats = Beats([1, 2], 10.0, 100.0)
    beats.note(1, 0, 101.0)
    assert beats.numbers == [1, 2]
    assert beats.silent(110.0) == []
    assert beats.silent(110.5) == [2]
    assert beats.silent(111.5) == [1, 2]


def test_a_counter_that_does_not_rise_is_no_sign_of_life() -> None:
    beats = Beats([1], 10.0, 0.0)
    for now in range(1, 9):
        beats.note(1, now, float(now))
    for now in range(9, 19):
        beats.note(1, 8, float(now))
    assert beats.silent(18.0) == []
    assert beats.silent(18.1) == [1]
    beats.note(1, 9, 18.1)
    assert beats.silent(18.2) == []
