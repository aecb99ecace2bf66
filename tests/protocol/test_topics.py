"""The table of topics: its keys."""

from protocol.topics import TOPICS


def test_names_are_keys() -> None:
    for name, topic in TOPICS.items():
        assert topic.name == name
