"""An episode of many turns whose calls are journalled in a spool, and which can be abandoned at any call."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from protocol.codec import decode_payload, encode_payload
from protocol.errors import EpisodeError
from protocol.messages import Call, Recalled, Rollout
from rollout.engines.base import Completion
from rollout.environments.session import sample_of
from rollout.prompts.base import Prompt
from rollout.sessions.answers.reader import AnswerReader
from rollout.sessions.record import Recording, SampleRecord
from rollout.sessions.requests import read_chat
from rollout.sessions.sampling import SamplingRules
from rollout.sessions.session import CallAnswer, Session, SessionLimits
from rollout.trajectory import assemble
from tests.rollout.sessions.chats import renderer
from trainer.storage.call_store import CallStore, recalled


class Killed(Exception):
    """The worker ends here."""


@dataclass
class Journal:
    """Calls of a group in a spool, as the ingest keeps them."""

    store: CallStore
    token: str
    epoch: str = "e"
    kill_at: int = -1
    """Number of the call that is on disk when the worker dies, without having been answered."""
    group: int = 1

    async def recall(self, sample: int) -> Recalled:
        self.store.hold(self.group, self.token)
        calls = [decode_payload(data) for data in self.store.recall(self.group, sample)]
        return recalled([call for call in calls if isinstance(call, Call)], self.epoch)

    async def store_call(self, call: Call) -> None:
        if why := self.store.put_many([(call, encode_payload(call))])[0]:
            raise EpisodeError("replay", why)
        if call.number == self.kill_at:
            raise Killed


@dataclass
class Worker:
    """One worker's attempt at the sample, under a lease of its own."""

    store: CallStore
    token: str
    version: int = 3
    epoch: str = "e"
    kill_at: int = -1
    generated: list[tuple[int, ...]] = field(default_factory=list)
    replayed: list[Completion] = field(default_factory=list)

    def recording(self, group: int = 1) -> Recording:
        journal = _Adapter(Journal(self.store, self.token, self.epoch, self.kill_at, group))
        return Recording(journal, group, self.token, self.epoch, f"engine-{self.token}", self.version)

    def record(self) -> SampleRecord:
        return self.recording().sample(0)

    def session(self, record: SampleRecord, reader: AnswerReader | None = None) -> Session:
        return Session(self, renderer("tool use"), SessionLimits(), reader, record, self.count_replayed)

    def count_replayed(self, completion: Completion) -> None:
        self.replayed.append(completion)

    async def __call__(self, tokens: tuple[int, ...], max_tokens: int | None) -> Completion:
        said = (len(tokens) % 7 + 3, len(self.token) + 5, len(self.generated) % 5 + 3)
        self.generated.append(said)
        return Completion(said, (-0.5, -0.25, -1.0), ((3, self.version),), "stop")


class _Adapter:
    """Names the methods as `CallJournal` does."""

    def __init__(self, journal: Journal) -> None:
        self.recall, self.store = journal.recall, journal.store_call


async def ask(session: Session, messages: list[Any]) -> CallAnswer:
    """Make one call."""
    return await session.answer(session.begin(read_chat({"messages": messages}, rules=SamplingRules())))


async def play(session: Session, turns: int, swerve: int = -1) -> list[tuple[int, ...]]:
    """Play the turns of a deterministic harness; from turn `swerve` on it says something else."""
    messages: list[Any] = [{"role": "user", "content": "begin"}]
    answers = []
    for turn in range(turns):
        answer = await ask(session, messages)
        answers.append(answer.call.completion.tokens)
        said = "other" if 0 <= swerve <= turn else f"turn {turn}"
        messages += [answer.message, {"role": "user", "content": said}]
    return answers


def rollout_of(session: Session, token: str) -> Rollout:
    """Return the message of the group, with this sample alone."""
    return assemble(
        Prompt("q"), (1, 2, 3), [sample_of(session, 1.0)], ["said"],
        group=1, token=token, engine="e", generate_s=0.0,
    )  # fmt: skip


def run(coroutine: Any) -> Any:
    """Run a coroutine to its end."""
    return asyncio.run(coroutine)
