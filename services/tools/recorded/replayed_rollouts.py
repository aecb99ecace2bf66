"""Generates the groups of a record again, and raises if a token differs from the record."""

from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from protocol.errors import TetherError
from protocol.messages import Rollout
from protocol.rollout_view import RowView, decode_rollout
from protocol.tensors import Array
from rollout.engines.base import Request, Sampling
from rollout.engines.hf.recorded import RecordedEngine, Tensors
from rollout.render import Renderer
from rollout.seeds import seed_within
from services.settings.sections import Settings


class RolloutReplayer:
    """Generator of a recorded run's rollouts. Text from environments and tools is copied from the record."""

    def __init__(self, settings: Settings, tensors: Callable[[int], Tensors]) -> None:
        """Load the initial model; `tensors` returns the tensors of a version, as for `RecordedEngine`."""
        self._settings = settings
        self._engine = RecordedEngine(settings.engine, settings.model_dir, tensors)
        self._stop = tuple(Renderer(settings.model_dir, settings.rendering).stop_token_ids)

    def replay(self, recorded: Rollout) -> Rollout:
        """Return a group with regenerated log-probabilities of its recorded tokens.

        Raises:
            ProtocolError: the record is inconsistent.
            TetherError: another token is generated; the message has group, sample and place.
        """
        view, logprobs = decode_rollout(recorded), recorded.logprobs.numpy().copy()
        starts = np.cumsum([0, *(len(row.tokens) for row in view.rows)])
        for number, row, call, first, end in _turns(recorded, view.rows):
            prompt = np.concatenate([view.prompt, row.context, row.tokens[:first]])
            sampling, seed = self._settings.sampling, self._settings.sampling_seed
            for place in (view.group, row.sample, call):
                seed = seed_within(seed, place)
            request = Request(
                f"{view.group}/{row.sample}.{call}",
                tuple(prompt.tolist()),
                Sampling(
                    max_tokens=end - first,
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    top_k=sampling.top_k,
                    stop_token_ids=self._stop,
                    seed=seed,
                ),
            )
            generated = self._engine.generate(request, row.versions[first:end].tolist())
            _check(view.group, row, first, row.tokens[first:end].tolist(), generated.tokens)
            begin = starts[number]
            logprobs[begin + first : begin + end] = generated.logprobs * row.sampled[first:end]
        return msgspec.structs.replace(recorded, logprobs=Array.of(logprobs, "float32"))


def _turns(rollout: Rollout, rows: tuple[RowView, ...]) -> Iterator[tuple[int, RowView, int, int, int]]:
    """Yield row number, row, call number in the sample, start and end of each model turn."""
    if rollout.turns is None:
        for number, row in enumerate(rows):
            yield number, row, 0, row.own_prompt, len(row.tokens)
        return
    calls = dict[int, int]()
    for sample, number, first, end in rollout.turns.numpy().tolist():
        yield number, rows[number], calls.get(sample, 0), first, end
        calls[sample] = calls.get(sample, 0) + 1


def _check(group: int, row: RowView, first: int, recorded: list[int], generated: list[int]) -> None:
    if recorded == generated:
        return
    place = next(
        (i for i, pair in enumerate(zip(recorded, generated, strict=False)) if len({*pair}) > 1),
        len(generated),
    )
    found = generated[place] if place < len(generated) else "an end"
    raise TetherError(
        f"group {group}, sample {row.sample}, token {first + place}: {found} was generated, and "
        f"{recorded[place]} is recorded; engine, environment or machine compute otherwise than the run's did"
    )
