"""Tests what clients get of an answer's tokens."""

from rollout.sessions.answers.content import answer_content
from rollout.sessions.answers.reader import ReadAnswer
from rollout.sessions.calls import text_end
from rollout.sessions.requests import HarnessRequest, read_chat, read_text
from rollout.sessions.sampling import SamplingRules
from tests.rollout.sessions.chats import renderer
from tests.rollout.sessions.serving import USER

RULES = SamplingRules("context")
TEXT = renderer("tool use")


def chat(**fields: object) -> HarnessRequest:
    return read_chat({"messages": [USER], **fields}, rules=RULES)


def test_the_first_of_several_strings_ends_text_and_thoughts() -> None:
    tokens = TEXT.encode("one, two. three")
    read = ReadAnswer("one, two. three", "so, hm")
    found = answer_content(chat(stop=["three", "two", ","]), (1,), tokens, read, TEXT)
    assert found.stopped_by == ","
    assert found.message == {"role": "assistant", "content": "one", "reasoning_content": "so"}
    assert found.also is not None


def test_without_such_a_string_an_answer_is_whole() -> None:
    for request in (chat(), chat(stop=["four"])):
        found = answer_content(request, (1,), TEXT.encode("one"), ReadAnswer("one"), TEXT)
        assert (found.message["content"], found.stopped_by, found.also) == ("one", "", None)


def test_a_text_is_continued_by_what_its_client_saw() -> None:
    request = read_text({"prompt": "a", "stop": ","}, rules=RULES)
    found = answer_content(request, (1,), TEXT.encode("b, c"), None, TEXT)
    assert (found.text, found.end) == ("b", text_end("ab"))


def test_names_of_tool_calls_follow_from_the_tokens() -> None:
    read = ReadAnswer("", calls=(("add", {"a": 1}), ("add", {"a": 1})))
    first, again = (answer_content(chat(), (1,), (5, 6), read, TEXT) for _ in range(2))
    other = answer_content(chat(), (1,), (5, 7), read, TEXT)
    names = [[call["id"] for call in found.message["tool_calls"]] for found in (first, again, other)]
    assert names[0] == names[1]
    assert len({*names[0], *names[2]}) == 4
