"""Makes random dialogues with tools, and asks transformers what a chat template writes of them."""

import json
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from protocol.errors import SettingsError
from rollout.render import Renderer
from rollout.sessions.messages import read_dialogue

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "string", "description": "A number."}},
            "required": ["x"],
        },
    },
}
WORDS = st.text(alphabet="abc the", min_size=1, max_size=6).map(lambda text: f"q{text}q")
"""Texts that no template trims."""


@st.composite
def dialogues(draw: Any) -> list[dict[str, Any]]:
    """A dialogue that ends with an answer and what follows it. Each answer ends with a word of its own."""
    messages = [{"role": "system", "content": draw(WORDS)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(WORDS)})
        for _ in range(draw(st.integers(0, 2))):
            messages += draw(call_and_results(len(messages)))
        thought = draw(st.sampled_from(["", "<think>\nhm\n</think>\n\n"]))
        messages.append({"role": "assistant", "content": f"{thought}{_word(len(messages))}"})
    if messages[-2]["role"] == "tool" and draw(st.booleans()):
        messages.pop()
    else:
        messages.append({"role": "user", "content": draw(WORDS)})
    return messages


@st.composite
def call_and_results(draw: Any, place: int) -> list[dict[str, Any]]:
    """An answer that calls a tool once or twice, and the results, or none of them."""
    ids = [f"call{place:04d}{i}" for i in range(draw(st.integers(1, 2)))]
    calls = [
        {"id": i, "type": "function", "function": {"name": "add", "arguments": json.dumps({"x": text})}}
        for i, text in zip(ids, [*["1"] * (len(ids) - 1), _word(place)], strict=True)
    ]
    results = [{"role": "tool", "tool_call_id": i, "name": "add", "content": draw(WORDS)} for i in ids]
    return [{"role": "assistant", "content": "", "tool_calls": calls}, *results]


def _word(place: int) -> str:
    return f"zq{place:03d}answer"


@dataclass(frozen=True)
class Written:
    """What a template writes of a dialogue up to some messages after an answer, by transformers alone."""

    before: str | None
    """The messages before the answer, with the beginning of its turn; None if it refuses them."""
    whole: str
    """All messages."""
    closing: int
    """Index in `whole` of what ends the answer's turn."""
    end: int
    """Index behind that."""

    @property
    def appended(self) -> bool:
        """Whether it has written what was before as it had been."""
        return self.before is not None and self.whole.startswith(self.before)


def written(renderer: Renderer, messages: list[dict[str, Any]], place: int) -> Written | None:
    """What the template writes of messages, of which `place` is an answer; None if it refuses them, or leaves
    out the answer, or has no token that ends a call."""
    dialogue = read_dialogue(messages, [TOOL])
    try:
        whole = renderer.dialogue_text(dialogue.messages, dialogue.tools)
    except SettingsError:
        return None
    try:
        before = renderer.dialogue_text(dialogue.messages[:place], dialogue.tools)
    except SettingsError:
        before = None
    if whole.count(_word(place)) != 1:
        return None
    behind = whole.index(_word(place)) + len(_word(place))
    stops = [renderer.piece(token) for token in renderer.stop_token_ids]
    found = min(((at, stop) for stop in stops if (at := whole.find(stop, behind)) >= 0), default=None)
    calls = "tool_calls" in messages[place]
    if calls and found is None:
        return None
    # a turn that ends without a token of its own ends where its text does
    if found is None or (not calls and renderer.text(renderer.encode(whole[behind : found[0]])).strip()):
        return Written(before, whole, behind, behind)
    return Written(before, whole, found[0] if calls else behind, found[0] + len(found[1]))
