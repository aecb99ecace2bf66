"""Episodes of text that are recorded: one whose worker was killed continues, and runs no tool again."""

from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from protocol.codec import decode_payload
from protocol.messages import Call
from rollout.config import EnvironmentConfig
from rollout.engines.base import Completion
from rollout.environments.base import Environment
from rollout.environments.episode import Episode, EpisodeEnvironment
from rollout.environments.registry import make_environment
from rollout.prompts.base import Prompt
from rollout.render import RenderConfig, Renderer
from rollout.sample import Sample
from rollout.trajectory import assemble
from services.run_record.call_audit import check_group
from tests.rollout.environments.test_environments import PROMPT, Player
from tests.rollout.sessions.durable import Killed, Worker
from tests.rollout.tokenizers import write_tokenizer
from trainer.storage.call_store import CallStore
from trainer.storage.spool import Spool

COMMAND = "```shell\necho x | tee -a log\nwc -l < log\ndate +%N\n```"
LINES = (COMMAND, COMMAND, "8")
RECORDS = 2 * len(LINES) - 1


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    letters = "`()*/'_[]<>:,!#\"|%+-$ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    return Renderer(write_tokenizer(tmp_path_factory.mktemp("plain"), more=letters), RenderConfig())


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CallStore]:
    with closing(Spool(tmp_path / "spool.sqlite")) as spool:
        yield CallStore(spool)


def journalled(store: CallStore) -> list[Call]:
    return [call for item in store.group_calls([1]) if isinstance(call := decode_payload(item.payload), Call)]


class Recorded(Player):
    """A player whose lines are recorded, by a worker that may be killed."""

    def __init__(self, renderer: Renderer, worker: Worker, *lines: str) -> None:
        super().__init__(renderer, *lines)
        self.record, self._version, self._given = worker.record(), worker.version, lines

    def count_replayed(self, completion: Completion) -> None:
        self._lines = self._lines[1:]

    async def __call__(self, tokens: tuple[int, ...], max_tokens: int | None) -> Completion:
        said = await super().__call__(tokens, max_tokens)
        return Completion(said.tokens, said.logprobs, ((len(said.tokens), self._version),), "stop")

    async def sample(self, environment: Environment) -> Sample:
        prompt = self._renderer.prompt_tokens(PROMPT)
        return await environment.run(PROMPT, prompt, self, self._renderer)


@pytest.mark.parametrize("at", range(RECORDS))
async def test_a_killed_worker_s_tools_are_not_run_again(
    store: CallStore, renderer: Renderer, at: int
) -> None:
    shell = make_environment(EnvironmentConfig("tools", {"tools": ["shell"]}))
    first = Recorded(renderer, Worker(store, "first", kill_at=at), *LINES)
    with suppress(Killed):
        await first.sample(shell)
    recorded = {call.number: call.result for call in journalled(store) if call.name}
    second = Recorded(renderer, Worker(store, "second"), *LINES)
    sample = await second.sample(shell)
    said = renderer.text(sample.tokens)
    assert said.endswith("8")
    assert [said.count(f"```output\nx\n{lines}\n") for lines in (1, 2)] == [1, 1]  # files were kept, too
    assert len(first.asked) + len(second.asked) == len(LINES)
    results = [call for call in journalled(store) if call.name]
    assert len(results) == 2
    assert {call.number: call.result for call in results}.items() >= recorded.items()
    rollout = assemble(
        Prompt("q"), renderer.prompt_tokens(PROMPT), [sample], [said], group=1, token="second", engine="e",
        generate_s=0.0,
    )  # fmt: skip
    assert check_group(rollout, journalled(store)) == (sum(sample.loss_mask), [])
    spoken = sum(len(renderer.prompt_tokens(Prompt(line))) for line in LINES)
    assert sum(sample.loss_mask) == spoken


async def guess(episode: Episode) -> float:
    """Two turns of the model."""
    await episode.generate()
    episode.insert("no")
    return float(await episode.generate() == "7")


async def test_an_older_turn_than_the_lease_is_context(store: CallStore, renderer: Renderer) -> None:
    environment = EpisodeEnvironment(guess)
    with suppress(Killed):
        await Recorded(renderer, Worker(store, "first", version=3, kill_at=0), "abc", "7").sample(environment)
    player = Recorded(renderer, Worker(store, "second", version=4), "abc", "7")
    sample = await player.sample(environment)
    assert (renderer.text(sample.tokens), sample.reward) == ("abcno7", 1.0)
    assert sample.loss_mask == (0,) * 5 + (1,)
    assert sample.logprobs == (0.0,) * 5 + (-0.5,)
    assert (sample.calls, sample.recorded) == (((0, 0, 3), (1, 5, 6)), (0, ()))
    assert player.record.replayed == 1


async def test_an_episode_that_is_not_recorded_keeps_results_in_memory(renderer: Renderer) -> None:
    thrown = []

    async def throw() -> int:
        thrown.append(len(thrown))
        return len(thrown)

    async def play(episode: Episode) -> float:
        await episode.generate()
        return float([await episode.once("dice", throw) for _ in range(2)] == [1, 1])

    prompt = renderer.prompt_tokens(PROMPT)
    sample = await EpisodeEnvironment(play).run(PROMPT, prompt, Player(renderer, "7"), renderer)
    assert (sample.reward, sample.calls, sample.recorded, thrown) == (1.0, (), None, [0])
