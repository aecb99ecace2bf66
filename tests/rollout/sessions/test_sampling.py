"""Tests the three modes for sampling parameters of requests, by the clients that people use."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
import pytest
from anthropic import AsyncAnthropic

from protocol.codec import decode_payload
from protocol.messages import Call
from protocol.rollout_view import decode_rollout
from rollout.engines.base import Completion, Sampling
from rollout.environments.session import sample_of
from rollout.sessions.refusal import RequestRefused
from rollout.sessions.requests import read_chat
from rollout.sessions.sampling import RequestSampling, SamplingRules
from rollout.sessions.session import Session
from services.run_record.call_audit import call_facts, check_group
from tests.rollout.sessions.chats import renderer
from tests.rollout.sessions.durable import Worker, rollout_of
from tests.rollout.sessions.serving import HELLO, USER, says, served
from trainer.storage.call_store import CallStore
from trainer.storage.spool import Spool

OWN = Sampling(max_tokens=8, temperature=0.7)
CONTEXT = SamplingRules("context", OWN, stop=("END",), seeds=True)


class Engine:
    """Generates by what it is asked, and notes it."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.asked: list[RequestSampling] = []

    async def __call__(
        self, tokens: tuple[int, ...], max_tokens: int | None, own: RequestSampling
    ) -> Completion:
        self.asked.append(own)
        said = renderer("tool use").encode(self.answers.pop(0) if self.answers else HELLO)
        return Completion(said, (-0.25,) * len(said), ((len(said), 3),), "stop")


@asynccontextmanager
async def asked(*answers: str) -> AsyncIterator[tuple[openai.AsyncOpenAI, Session, Engine, AsyncAnthropic]]:
    """Serve a session in the mode `context`, with an engine that says these texts when it is asked."""
    engine = Engine(*answers)
    async with served(rules=CONTEXT, generate_as=engine) as (client, session, endpoint, key):
        base = endpoint.url(key).removesuffix("/v1")
        async with AsyncAnthropic(base_url=base, api_key=key) as other:
            yield client, session, engine, other


async def test_parameters_of_the_run_are_accepted_and_others_are_refused_by_name() -> None:
    rules = SamplingRules("refuse", OWN, stop=("END", "STOP"))
    async with served(rules=rules) as (client, session, endpoint, key):
        same: dict[str, Any] = {
            "temperature": 0.7, "top_p": 1.0, "presence_penalty": 0, "logit_bias": {}, "n": 1,
            "response_format": {"type": "text"}, "stop": ["STOP", "END"],
        }  # fmt: skip
        await client.chat.completions.create(model="m", messages=[USER], **same, extra_body={"top_k": -1})
        await client.completions.create(model="m", prompt="a", temperature=0.7)
        await client.responses.create(model="m", input="a", temperature=0.7, top_p=1)
        parameters = {"max_tokens": 8, "temperature": 0.7, "top_k": 0, "stop": [], "n": 1}
        async with aiohttp.ClientSession() as http:
            url = endpoint.url(key).removesuffix("/v1") + "/inference/v1/generate"
            async with http.post(url, json={"token_ids": [5], "sampling_params": parameters}) as response:
                assert response.status == 200
            for name, value in (("top_p", True), ("temperature", 0.5)):
                body = {"model": "m", "messages": [USER], name: value}
                async with http.post(endpoint.url(key) + "/chat/completions", json=body) as response:
                    assert response.status == 400
        assert session.overridden == 0
        other: dict[str, Any] = {
            "temperature": 1.0, "top_p": 0.9, "seed": 7, "frequency_penalty": 0.1, "stop": "END", "n": 2,
            "response_format": {"type": "json_object"},
        }  # fmt: skip
        for name, value in other.items():
            with pytest.raises(openai.BadRequestError, match=f"{name} = .* would change the distribution"):
                await client.chat.completions.create(model="m", messages=[USER], **{name: value})


@pytest.mark.parametrize(
    ("name", "seeds", "advised"),
    [("temperature", False, True), ("seed", True, True), ("seed", False, False), ("min_p", True, False)],
)
def test_refusal_advises_context_where_the_engine_could_generate_so(
    name: str, seeds: bool, advised: bool
) -> None:
    with pytest.raises(RequestRefused, match=f"{name} = 1 would change") as refused:
        SamplingRules("refuse", OWN, seeds=seeds).read({name: 1})
    assert (' or "context"' in str(refused.value)) == advised


async def test_parameters_may_be_left_to_the_run() -> None:
    async with served(rules=SamplingRules("run")) as (client, session, _, _):
        raw = await client.chat.completions.with_raw_response.create(
            model="m", messages=[USER], temperature=0.0, seed=7, n=3, stop=["the"],
            response_format={"type": "json_object"},
        )  # fmt: skip
        assert raw.headers["x-tether-not-applied"] == "n, response_format, seed, stop, temperature"
        (choice,) = raw.parse().choices
        assert choice.message.content == HELLO
        assert session.overridden == 1
        assert session.tree.calls[0].trained


async def test_an_answer_that_was_generated_as_asked_is_not_trained() -> None:
    async with asked() as (client, session, engine, _):
        await client.chat.completions.create(model="m", messages=[USER], temperature=0, top_p=0.5, seed=3)
        await client.chat.completions.create(model="m", messages=[USER], temperature=0.7)
        await client.completions.create(model="m", prompt="a", extra_body={"top_k": 5})
        await client.responses.create(model="m", input="a", temperature=1.5)
    assert engine.asked == [
        RequestSampling(temperature=0, top_p=0.5, seed=3),
        RequestSampling(top_k=5),
        RequestSampling(temperature=1.5),
    ]
    assert [call.trained for call in session.tree.calls] == [False, True, False, False]
    rows = [sample_of(session, 1.0), *sample_of(session, 1.0).branches]
    for row, call in zip(rows, session.tree.calls, strict=True):
        assert (sum(row.loss_mask) == 0) == call.has_own_sampling
        assert any(row.logprobs) != call.has_own_sampling


async def test_several_answers_are_calls_of_their_own_in_every_shape() -> None:
    texts = ("one", "two", "three")
    async with asked(*texts * 3) as (client, session, engine, _):
        chat = await client.chat.completions.create(model="m", messages=[USER], n=3)
        assert [(c.index, c.message.content) for c in chat.choices] == [*enumerate(texts)]
        text = await client.completions.create(model="m", prompt="a", n=3)
        assert [(c.index, c.text) for c in text.choices] == [*enumerate(texts)]
        assert text.usage is not None
        said = sum(len(call.completion.tokens) for call in session.tree.calls[3:])
        assert text.usage.completion_tokens == said
        streamed: dict[int, str] = {}
        async for chunk in await client.chat.completions.create(model="m", messages=[USER], n=3, stream=True):
            for choice in chunk.choices:
                streamed[choice.index] = streamed.get(choice.index, "") + (choice.delta.content or "")
        assert streamed == dict(enumerate(texts))
        assert len(session.tree.calls) == 9
        again: Any = [USER, {"role": "assistant", "content": "two"}, {"role": "user", "content": "more"}]
        await client.chat.completions.create(model="m", messages=again)
        parent = session.tree.calls[9].parent
        assert parent is not None
        assert session.renderer.text(parent.completion.tokens) == "two"
    assert engine.asked == [RequestSampling(n=3)] * 9


async def test_each_of_several_answers_has_a_seed_of_its_own() -> None:
    async with asked() as (client, _, engine, _):
        await client.chat.completions.create(model="m", messages=[USER], seed=3, n=3)
        await client.completions.create(model="m", prompt="a", seed=3)
    *several, alone = engine.asked
    assert alone == RequestSampling(seed=3)
    assert len({each.seed for each in several}) == 3
    assert alone.seed in {each.seed for each in several}


async def test_an_answer_ends_before_the_string_that_stopped_it() -> None:
    async with asked(*["one, two"] * 3) as (client, session, _, other):
        chat = await client.chat.completions.create(model="m", messages=[USER], stop=[" two", ","])
        assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == ("one", "stop")
        text = await client.completions.create(model="m", prompt="a", stop=",")
        assert text.choices[0].text == "one"
        said = await other.messages.create(model="m", max_tokens=9, messages=[USER], stop_sequences=[","])  # type: ignore[list-item]
        assert (said.stop_reason, said.stop_sequence) == ("stop_sequence", ",")
        assert said.content[0].text == "one"  # type: ignore[union-attr]
        again: Any = [USER, {"role": "assistant", "content": "one"}, {"role": "user", "content": "more"}]
        await client.chat.completions.create(model="m", messages=again)
        assert session.tree.calls[3].parent is session.tree.calls[2]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"min_p": 0.1}, "min_p"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"temperature": 0.001}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"n": 10**6}, "n"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
    ],
)
def test_parameters_that_no_engine_has_are_refused_by_name(body: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        read_chat({"messages": [USER], **body}, rules=CONTEXT)
    assert (refused.value.status, refused.value.param) == (400, named)


@pytest.mark.parametrize(
    ("body", "helps"), [({"n": 2}, True), ({"min_p": 0.1}, False), ({"best_of": 2}, False)]
)
def test_a_refusal_advises_context_where_that_would_generate_as_asked(
    body: dict[str, Any], *, helps: bool
) -> None:
    with pytest.raises(RequestRefused) as refused:
        read_chat({"messages": [USER], **body}, rules=SamplingRules("refuse", OWN))
    assert ('"run"' in str(refused.value), '"context"' in str(refused.value)) == (True, helps)


def test_a_seed_is_refused_where_the_engine_has_none() -> None:
    rules = SamplingRules("context", OWN)
    with pytest.raises(RequestRefused, match="no seeds of single requests"):
        read_chat({"messages": [USER], "seed": 1}, rules=rules)


async def test_apis_with_one_answer_know_no_number_of_answers() -> None:
    async with asked() as (client, session, _, _):
        with pytest.raises(openai.BadRequestError, match="n is not known here"):
            await client.responses.create(model="m", input="a", extra_body={"n": 2})
        with pytest.raises(openai.BadRequestError, match="response_format"):
            await client.responses.create(model="m", input="a", text={"format": {"type": "json_object"}})
        assert session.tree.calls == []


async def test_more_answers_than_calls_are_left_are_refused_without_a_change() -> None:
    async with asked() as (client, session, engine, _):
        with pytest.raises(openai.APIStatusError, match="max_running"):
            await client.with_options(max_retries=0).chat.completions.create(model="m", messages=[USER], n=65)
        assert (session.tree.calls, engine.asked) == ([], [])


async def test_an_episode_of_context_alone_is_no_sample() -> None:
    async with asked() as (client, session, _, _):
        await client.chat.completions.create(model="m", messages=[USER], temperature=0)
    with pytest.raises(ValueError, match="no token of the episode may be trained"):
        sample_of(session, 1.0)


async def test_context_calls_are_journalled_replayed_and_audited(tmp_path: Any) -> None:
    """A second worker goes by the record, and `verify` finds what was trained in spite of its mark."""
    spool = Spool(tmp_path / "spool.sqlite")
    store = CallStore(spool)

    async def play(worker: Worker) -> tuple[Session, Engine]:
        record, engine = worker.record(), Engine("one", "two", "three")
        await record.begin(replayable=True)
        session = Session(
            says, renderer("tool use"), worker.session(record)._limits, None, record,
            worker.count_replayed, rules=CONTEXT, generate_as=engine,
        )  # fmt: skip
        for body in ({"temperature": 0.0}, {}, {"n": 2}):
            await session.answer(session.begin(read_chat({"messages": [USER], **body}, rules=session.rules)))
        return session, engine

    first, _ = await play(Worker(store, "first"))
    worker = Worker(store, "second")
    again, engine = await play(worker)
    assert (engine.asked, len(worker.replayed)) == ([], 4)
    assert [c.completion for c in first.tree.calls] == [c.completion for c in again.tree.calls]
    assert [call.trained for call in again.tree.calls] == [False, True, False, False]

    calls = [decode_payload(data) for data in store.recall(1, 0)]
    journalled = [call for call in calls if isinstance(call, Call)]
    assert [call.sampling for call in journalled] == ['{"temperature": 0.0}', "", '{"n": 2}', '{"n": 2}']
    assert [fact.get("sampling", "") for fact in call_facts(journalled)] == [c.sampling for c in journalled]
    rollout = rollout_of(again, "second")
    tokens, problems = check_group(rollout, journalled)
    assert (tokens, problems) == (len(again.tree.calls[1].completion.tokens), [])
    assert sum(int(row.sampled.sum()) for row in decode_rollout(rollout).rows) == tokens

    for call in again.tree.calls:
        object.__setattr__(call, "trained", True)
    _, problems = check_group(rollout_of(again, "second"), journalled)
    assert len(problems) == 3
    assert all("was generated with {" in problem and "is trained" in problem for problem in problems)
    spool.close()
