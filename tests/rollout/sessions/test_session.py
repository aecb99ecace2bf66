"""Sessions over every chat template at hand: a branch is what was sampled and inserted."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from protocol.errors import EngineError, EpisodeError, InvalidRequest
from protocol.rollout_view import decode_rollout
from protocol.turns import turns_of
from rollout.engines.base import Completion
from rollout.environments.session import sample_of
from rollout.prompts.base import Prompt
from rollout.sample import Branch, EpisodeOver, Sample
from rollout.sessions.branches import branches_of
from rollout.sessions.refusal import RequestRefused
from rollout.sessions.requests import read_chat, read_text
from rollout.sessions.sampling import SamplingRules
from rollout.sessions.session import CallAnswer, Session, SessionLimits
from rollout.trajectory import assemble
from tests.rollout.sessions.chats import renderer, templates
from tests.rollout.sessions.harness import ACTIONS, CALL_TEXT, reply, rewritten, said_tokens

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}


class Engine:
    """Says what it is given to say, and keeps every context and answer."""

    def __init__(self) -> None:
        self.says: tuple[int, ...] = ()
        self.seen: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    async def __call__(self, tokens: tuple[int, ...], max_tokens: int | None) -> Completion:
        self.seen.append((tokens, self.says))
        version, count = len(self.seen), len(self.says)
        return Completion(self.says, (-0.25 * version,) * count, ((count, version),), "stop")


def opened(name: str) -> tuple[Session, Engine]:
    engine = Engine()
    return Session(engine, renderer(name), SessionLimits()), engine


def ask(session: Session, messages: Sequence[Any], tools: Sequence[Any] = ()) -> CallAnswer:
    body = {"messages": list(messages), **({"tools": list(tools)} if tools else {})}
    return asyncio.run(session.answer(session.begin(read_chat(body, rules=SamplingRules()))))


def asked(session: Session, messages: Sequence[Any], tools: Sequence[Any] = ()) -> CallAnswer | None:
    """The answer, or None where the template's own rules refuse the messages."""
    try:
        return ask(session, messages, tools)
    except RequestRefused as refusal:
        if "template refuses" in refusal.message or "has no tokens" in refusal.message:
            return None
        raise


def full_rows(branches: Sequence[Branch]) -> list[tuple[int, ...]]:
    rows: list[tuple[int, ...]] = []
    for branch in branches:
        before = rows[branch.parent][: branch.shared] if branch.parent >= 0 else ()
        rows.append((*before, *branch.tokens))
    return rows


def check_exact(session: Session, engine: Engine) -> None:
    """Every call's context and answer lie in a row as they were; each sampled token is trained once."""
    branches = branches_of(session.tree)
    rows = full_rows(branches)
    for context, sampled in engine.seen:
        assert any(row[: len(context) + len(sampled)] == context + sampled for row in rows)
    for row in rows:
        assert any(row == context + sampled for context, sampled in engine.seen)
    trained = [
        (token, logprob)
        for branch in branches
        for token, logprob, mask in zip(branch.tokens, branch.logprobs, branch.loss_mask, strict=True)
        if mask
    ]
    said = [(t, -0.25 * (i + 1)) for i, (_, sampled) in enumerate(engine.seen) for t in sampled]
    assert sorted(trained) == sorted(said)
    for branch in branches:
        assert branch.spans[-1][0] == len(branch.tokens)
        assert len(branch.tokens) == len(branch.logprobs) == len(branch.loss_mask)
        assert any(branch.loss_mask)
        assert all(
            mask or logprob == 0 for mask, logprob in zip(branch.loss_mask, branch.logprobs, strict=True)
        )


def check_wire(session: Session) -> None:
    """The rows of a message, read back, are those of the session, beside a sample with another prompt."""
    sample = sample_of(session, 1.0)
    other = Sample((5,), (-0.5,), (1,), ((1, 2),), "stop", 0.0, prompt=(9, 8))
    for samples in ([sample], [sample, other], [other, sample, sample]):
        rollout = assemble(
            Prompt("q"), (1, 2, 3), samples, ["said"] * len(samples),
            group=1, token="t", engine="e", generate_s=0.0,
        )  # fmt: skip
        view = decode_rollout(rollout)
        rows = [row for row in view.rows if samples[row.sample] is sample]
        expected = full_rows(branches_of(session.tree)) * sum(s is sample for s in samples)
        assert [(*view.prompt, *row.context, *row.tokens) for row in rows] == expected
        counted = sum(len(call.completion.tokens) for call in session.tree.calls)
        assert sum(int(row.sampled.sum()) for row in rows) == counted * sum(s is sample for s in samples)
        said = [call.completion.tokens for call in session.tree.calls]
        turns = turns_of(rollout)
        assert (turns is None) == (len(said) == 1)
        for index, of_sample in enumerate(turns or ()):
            if samples[index] is sample:
                found = [view.rows[turn.row].tokens[turn.first : turn.end] for turn in of_sample]
                assert [tuple(tokens) for tokens in found] == said


CHEAP = settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
DEEP = settings(CHEAP, max_examples=60)


def check_random_session(name: str, actions: list[Any]) -> None:
    """Run a harness of random actions, and check what is recorded of it."""
    session, engine = opened(name)
    main: list[dict[str, Any]] = [{"role": "user", "content": "abc"}]
    other: list[dict[str, Any]] = [
        {"role": "system", "content": "You help."},
        {"role": "user", "content": "the"},
    ]
    tools: list[Any] = [TOOL]
    for action, words, drawn, kind, ends in actions:
        engine.says = said_tokens(name, drawn, kind, ends)
        main = rewritten(main, action, words)
        if action == "other tools":
            tools = [] if tools else [TOOL]
        messages = other if action == "sub-agent" else main
        before, count = list(engine.seen), session.restarts
        answer = asked(session, messages, tools)
        if answer is None:
            assert engine.seen == before
            main = [{"role": "user", "content": words or "a"}]
            continue
        check_continued(session, engine, answer, session.restarts - count)
        if action == "at once":
            both_asked(session, messages, tools)
        elif action != "again":
            messages += reply(answer, action, words)
    if engine.seen:
        check_exact(session, engine)
        check_wire(session)


def check_continued(session: Session, engine: Engine, answer: CallAnswer, restarts: int) -> None:
    """The context of a call is what it continues, and what was inserted; a restart continues nothing."""
    parent, inserted = answer.call.parent, answer.call.inserted
    context = engine.seen[-1][0]
    assert context == (*(parent.tokens() if parent is not None else ()), *inserted)
    assert restarts in (0, 1)
    assert parent is None or not restarts


def both_asked(session: Session, messages: Sequence[Any], tools: Sequence[Any]) -> None:
    """Two requests that both begin before either is answered, the later one answered first."""
    body = {"messages": list(messages), **({"tools": list(tools)} if tools else {})}
    first, second = (session.begin(read_chat(body, rules=SamplingRules())) for _ in range(2))
    for begun in (second, first):
        asyncio.run(session.answer(begun))


@pytest.mark.parametrize("name", sorted(templates()))
@CHEAP
@given(actions=ACTIONS)
def test_branches_are_what_was_sampled_and_inserted(name: str, actions: list[Any]) -> None:
    check_random_session(name, actions)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(templates()))
@DEEP
@given(actions=ACTIONS)
def test_branches_are_what_was_sampled_and_inserted_in_long(name: str, actions: list[Any]) -> None:
    check_random_session(name, actions)


@pytest.mark.parametrize("name", sorted(templates()))
def test_a_plain_dialogue_is_one_branch(name: str) -> None:
    session, engine = opened(name)
    text = renderer(name)
    messages: list[Any] = []
    for turn in range(3):
        # two tokens whose text is one: tokenizing it again would show
        engine.says = (*text.encode("a"), *text.encode("b"), text.stop_token_ids[0])
        messages.append({"role": "user", "content": f"q{turn}"})
        answer = asked(session, messages)
        if answer is None:
            return
        messages.append(answer.message)
    assert len(branches_of(session.tree)) == 1 + session.restarts
    contexts = [context for context, _ in engine.seen]
    for (context, sampled), later in zip(engine.seen, contexts[1:], strict=False):
        assert later[: len(context) + len(sampled)] == context + sampled
    check_exact(session, engine)


@pytest.mark.parametrize("name", ["tool use", "trims", "none", "template_chatml"])
def test_a_continued_context_reads_as_the_template_writes_it(name: str) -> None:
    """For templates that only append."""
    session, engine = opened(name)
    text = renderer(name)
    messages: list[Any] = [{"role": "user", "content": "the abc"}]
    for question in ("more", "abab"):
        engine.says = (*text.encode("yes"), *text.stop_token_ids[:1])
        messages.append(ask(session, messages).message)
        messages.append({"role": "user", "content": question})
    ask(session, messages)
    shown = "".join(text.piece(token) for token in engine.seen[-1][0])
    if name != "none":
        assert shown == text.dialogue_text(messages)
    else:
        assert shown == "the abcyes<eos>moreyes<eos>abab"


def test_results_of_tools_follow_as_the_template_writes_them() -> None:
    for name in ("tool use", "forgets thoughts"):
        session, engine = opened(name)
        text = renderer(name)
        engine.says = (*text.encode(CALL_TEXT), text.stop_token_ids[0])
        messages: list[Any] = [{"role": "user", "content": "q"}]
        answer = ask(session, messages, [TOOL])
        assert answer.finish_reason == "tool_calls"
        assert json.loads(answer.message["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
        messages += [answer.message, {"role": "tool", "tool_call_id": "x", "content": "1"},
                     {"role": "tool", "tool_call_id": "y", "content": "2"}]  # fmt: skip
        ask(session, messages, [TOOL])
        (first, said), (second, _) = engine.seen
        added = "".join(text.piece(token) for token in second[len(first) + len(said) :])
        assert added.startswith(
            "\n<|im_start|>user<tool_response>\n1\n</tool_response><tool_response>\n2\n</tool_response><|im_end|>"
        )


def test_a_template_that_needs_a_call_before_a_result_gets_one() -> None:
    session, engine = opened("call before result")
    text = renderer("call before result")
    engine.says = text.encode(CALL_TEXT)
    messages: list[Any] = [{"role": "user", "content": "q"}]
    messages.append(ask(session, messages, [TOOL]).message)
    messages.append({"role": "tool", "tool_call_id": "x", "content": "7"})
    ask(session, messages, [TOOL])
    (first, said), (second, _) = engine.seen
    assert second[: len(first) + len(said)] == first + said
    assert session.restarts == 0


def test_kept_thoughts_stay_in_the_context_whatever_the_template_does() -> None:
    session, engine = opened("forgets thoughts")
    text = renderer("forgets thoughts")
    engine.says = (*text.encode("abc</think>yes"), text.stop_token_ids[0])
    messages: list[Any] = [{"role": "user", "content": "q"}]
    messages.append(ask(session, messages).message)
    ask(session, [*messages, {"role": "user", "content": "r"}])
    assert "</think>yes" in "".join(text.piece(token) for token in engine.seen[1][0])
    messages[1] = {"role": "assistant", "content": "yes"}  # a harness that leaves thoughts out
    ask(session, [*messages, {"role": "user", "content": "r"}])
    assert "</think>" not in "".join(text.piece(token) for token in engine.seen[2][0])
    assert len(branches_of(session.tree)) == 2
    check_exact(session, engine)


def test_two_answers_to_one_context_are_both_trained() -> None:
    session, engine = opened("tool use")
    for words in ("abx", "aby"):
        engine.says = renderer("tool use").encode(words)
        ask(session, [{"role": "user", "content": "q"}])
    first, second = branches_of(session.tree)
    context = len(engine.seen[0][0])
    assert (first.parent, first.shared, second.parent, second.shared) == (-1, 0, 0, context)
    assert second.loss_mask == (1,) * len(engine.says)
    check_exact(session, engine)


def test_a_withdrawn_call_leaves_nothing() -> None:
    session, engine = opened("tool use")
    engine.says = renderer("tool use").encode("x")
    messages: list[Any] = [{"role": "user", "content": "q"}]
    answer = ask(session, messages)
    assert session.tree.withdraw(answer.call)
    assert not session.tree.withdraw(answer.call)
    assert branches_of(session.tree) == ()
    again = ask(session, messages)
    follow = ask(session, [*messages, again.message, {"role": "user", "content": "r"}])
    assert follow.call.parent is again.call
    assert not session.tree.withdraw(again.call)  # continued: what was built on it stays


def test_a_call_that_continues_a_withdrawn_one_has_its_tokens_as_context() -> None:
    session, engine = opened("tool use")
    engine.says = renderer("tool use").encode("x")
    messages: list[Any] = [{"role": "user", "content": "q"}]
    seen = ask(session, messages)
    more = [*messages, seen.message, {"role": "user", "content": "r"}]
    begun = session.begin(read_chat({"messages": more}, rules=SamplingRules()))
    assert session.tree.withdraw(seen.call)
    answer = asyncio.run(session.answer(begun))
    sample = sample_of(session, None)
    assert sample.prompt == begun.context == engine.seen[1][0]
    assert (sample.tokens, sum(sample.loss_mask)) == (answer.call.completion.tokens, len(engine.says))


def test_completions_continue_their_text_and_their_tokens() -> None:
    session, engine = opened("none")
    text = renderer("none")
    engine.says = (*text.encode("a"), *text.encode("b"))

    def complete(prompt: Any) -> CallAnswer:
        request = read_text({"prompt": prompt}, rules=SamplingRules())
        return asyncio.run(session.answer(session.begin(request)))

    assert complete("the").text == "ab"
    complete("theab then")
    complete(list(engine.seen[1][0] + engine.says) + [20, 21])
    assert len(branches_of(session.tree)) == 1
    complete("theax")
    assert len(branches_of(session.tree)) == 2
    check_exact(session, engine)


def test_a_completion_keeps_no_text_of_its_prompt() -> None:
    session, engine = opened("none")
    text = renderer("none")
    engine.says = (*text.encode("a"), *text.encode("b"))
    for prompt in ("the", "theab other", "theab otherab x", "thea", "the"):
        asyncio.run(session.answer(session.begin(read_text({"prompt": prompt}, rules=SamplingRules()))))
    calls = session.tree.calls
    assert [call.parent and calls.index(call.parent) for call in calls] == [None, 0, 1, None, None]
    assert [call.end[0] for call in calls if isinstance(call.end, tuple)] == [5, 13, 17, 6, 5]


def test_limits_refuse_and_change_nothing() -> None:
    engine = Engine()
    engine.says = (20,)
    session = Session(engine, renderer("tool use"), SessionLimits(max_calls=1))
    ask(session, [{"role": "user", "content": "q"}])
    with pytest.raises(RequestRefused, match="max_calls"):
        ask(session, [{"role": "user", "content": "r"}])
    session.end("the episode is over")
    with pytest.raises(RequestRefused, match="the episode is over") as refused:
        ask(session, [{"role": "user", "content": "r"}])
    assert refused.value.status == 410
    assert len(engine.seen) == 1


def test_ending_a_session_ends_its_calls() -> None:
    async def forever(tokens: tuple[int, ...], max_tokens: int | None) -> Completion:
        running.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def scenario() -> None:
        session = Session(forever, renderer("tool use"), SessionLimits())
        body = {"messages": [{"role": "user", "content": "q"}]}
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(_refusal(session, body))
            await running.wait()
            session.end("time")
        assert task.result().status == 410
        assert session.tree.calls == []

    running = asyncio.Event()
    asyncio.run(scenario())


async def _refusal(session: Session, body: dict[str, Any]) -> RequestRefused:
    with pytest.raises(RequestRefused) as refused:
        await session.answer(session.begin(read_chat(body, rules=SamplingRules())))
    return refused.value


@pytest.mark.parametrize(
    ("error", "status", "truncated"),
    [
        (EngineError("request 1: aborted"), 500, False),
        (InvalidRequest("request 1: aborted"), 400, False),
        (EpisodeError("call_s", "request 1: aborted"), 500, False),
        (EpisodeOver("request 1: aborted"), 400, True),
    ],
)
def test_a_call_that_fails_says_why(error: Exception, status: int, truncated: bool) -> None:
    async def fails(tokens: tuple[int, ...], max_tokens: int | None) -> Completion:
        raise error

    session = Session(fails, renderer("tool use"), SessionLimits())
    refusal = asyncio.run(_refusal(session, {"messages": [{"role": "user", "content": "q"}]}))
    assert (refusal.status, session.truncated, session.tree.calls) == (status, truncated, [])
    assert "request 1: aborted" in refusal.message
