"""The table of topics: its keys, and which side binds."""

from protocol.topics import TOPICS, Pattern


def test_names_are_keys_and_one_side_binds() -> None:
    for name, topic in TOPICS.items():
        assert topic.name == name
        assert topic.binds in (topic.sender, topic.receiver)


def test_only_broadcasts_are_bound_by_the_sender() -> None:
    for topic in TOPICS.values():
        assert (topic.binds is topic.sender) == (topic.pattern is Pattern.BROADCAST)
