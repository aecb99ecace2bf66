"""Defines faults between engine and trainer: records, templates, verifiers, versions."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from protocol.messages import Rollout
from protocol.tensors import Array
from rollout.prompts.base import Prompt
from tests.trials.silent.faults import fault
from tests.trials.silent.world import World, rewards_of

ENGINE = "engine.1"
"""The worker that has the fault."""


def record_with(world: World, change: Callable[[Rollout], Rollout]) -> None:
    """Change the broken worker's messages."""
    world.record = lambda rollout: change(rollout) if rollout.engine == ENGINE else rollout


def by_row(rollout: Rollout, values: Array) -> list[NDArray[Any]]:
    """Return an array of all tokens as one for each row."""
    return np.split(values.numpy().copy(), np.cumsum(rollout.lengths.numpy())[:-1])


def replaced(rollout: Rollout, **arrays: Sequence[NDArray[Any]]) -> Rollout:
    """Return the rollout with arrays of all tokens that are given for each row."""
    joined = {name: Array.of(np.concatenate(rows), str(rows[0].dtype)) for name, rows in arrays.items()}
    return msgspec.structs.replace(rollout, **joined)


@fault("loss mask off by one", "mask", engine=ENGINE)
def shifted_mask(world: World) -> None:
    """Leave the first token of each turn out, as a mask that begins a token late does."""

    def change(rollout: Rollout) -> Rollout:
        masks, logprobs = by_row(rollout, rollout.loss_mask), by_row(rollout, rollout.logprobs)
        for mask, row in zip(masks, logprobs, strict=True):
            mask &= np.concatenate([[0], mask[:-1]]).astype(mask.dtype)
            row[mask == 0] = 0
        return replaced(rollout, loss_mask=masks, logprobs=logprobs)

    record_with(world, change)


@fault("log-probabilities one token late", "logprob", engine=ENGINE)
def shifted_logprobs(world: World) -> None:
    def change(rollout: Rollout) -> Rollout:
        rows = by_row(rollout, rollout.logprobs)
        for row, mask in zip(rows, by_row(rollout, rollout.loss_mask), strict=True):
            row[mask == 1] = np.roll(row[mask == 1], 1)
        return replaced(rollout, logprobs=rows)

    record_with(world, change)


@fault("tool tokens dropped", "logprob", engine=ENGINE, turn="2")
def dropped_tool(world: World) -> None:
    """Send the turns of the model without the words of the tool between them."""

    def change(rollout: Rollout) -> Rollout:
        masks = by_row(rollout, rollout.loss_mask)
        kept = {
            name: [row[mask == 1] for row, mask in zip(by_row(rollout, values), masks, strict=True)]
            for name, values in (
                ("tokens", rollout.tokens),
                ("logprobs", rollout.logprobs),
                ("loss_mask", rollout.loss_mask),
            )
        }
        lengths = [len(row) for row in kept["tokens"]]
        spans, turns = [], []
        for row, version in _last_versions(rollout):
            spans.append((row, lengths[row], version))
        for sample, row, first, end in rollout.turns.numpy().tolist() if rollout.turns is not None else []:
            before = int((masks[row][:first] == 0).sum())
            turns.append((sample, row, first - before, end - before))
        return msgspec.structs.replace(
            replaced(rollout, **kept),
            lengths=Array.of(lengths, "int32"),
            spans=Array.of(spans, "int32"),
            turns=Array.of(turns, "int32"),
            row_texts=tuple(rollout.responses),
        )

    record_with(world, change)


def _last_versions(rollout: Rollout) -> list[tuple[int, int]]:
    """Return the newest version of each row."""
    return sorted({row: version for row, _, version in rollout.spans.numpy().tolist()}.items())


@fault("tool result with another turn's template", "logprob", engine=ENGINE, turn="2")
def tool_template(world: World) -> None:
    """Record other tokens for a tool's result than the engine was given."""

    def change(rollout: Rollout) -> Rollout:
        rows = by_row(rollout, rollout.tokens)
        for row, mask in zip(rows, by_row(rollout, rollout.loss_mask), strict=True):
            row[mask == 0] = np.roll(row[mask == 0], 1)
        return msgspec.structs.replace(replaced(rollout, tokens=rows), row_texts=tuple(rollout.responses))

    record_with(world, change)


@fault("prompt with a wrong turn of the template", "prompt")
def prompt_template(world: World) -> None:
    renderer = world.renderer
    right = renderer.prompt_tokens

    def wrong(prompt: Prompt) -> tuple[int, ...]:
        tokens = right(prompt)
        return (*tokens, tokens[-1])

    renderer.prompt_tokens = wrong  # type: ignore[method-assign]


@fault("texts of samples swapped", "response", engine=ENGINE)
def swapped_texts(world: World) -> None:
    record_with(
        world, lambda rollout: msgspec.structs.replace(rollout, responses=tuple(reversed(rollout.responses)))
    )


@fault("log-probabilities of samples swapped", "logprob", engine=ENGINE)
def swapped_logprobs(world: World) -> None:
    """Give two samples the log-probabilities of each other, as far as both go."""

    def change(rollout: Rollout) -> Rollout:
        rows = by_row(rollout, rollout.logprobs)
        masks = by_row(rollout, rollout.loss_mask)
        shorter = min(len(rows[0]), len(rows[1]))
        both = (masks[0][:shorter] == 1) & (masks[1][:shorter] == 1)
        first = rows[0][:shorter][both].copy()
        rows[0][:shorter][both], rows[1][:shorter][both] = rows[1][:shorter][both], first
        return replaced(rollout, logprobs=rows)

    record_with(world, change)


@fault("one sample twice", "copy", engine=ENGINE)
def doubled(world: World) -> None:
    """Send the first sample in place of the second one, too."""

    def change(rollout: Rollout) -> Rollout:
        names = ("tokens", "logprobs", "loss_mask")
        rows = {name: by_row(rollout, getattr(rollout, name)) for name in names}
        for values in rows.values():
            values[1] = values[0].copy()
        spans = rollout.spans.numpy()
        copied = spans[spans[:, 0] == 0].copy()
        copied[:, 0] = 1
        turns = rollout.turns.numpy() if rollout.turns is not None else np.zeros((0, 4), dtype=np.int32)
        again = turns[turns[:, 0] == 0].copy()
        again[:, :2] = 1
        lengths = rollout.lengths.numpy().copy()
        lengths[1] = lengths[0]
        return msgspec.structs.replace(
            replaced(rollout, **rows),
            lengths=Array.of(lengths, "int32"),
            spans=Array.of(
                np.concatenate([spans[spans[:, 0] == 0], copied, spans[spans[:, 0] > 1]]), "int32"
            ),
            turns=Array.of(np.concatenate([turns[turns[:, 0] == 0], again, turns[turns[:, 0] > 1]]), "int32"),
            responses=(rollout.responses[0], *rollout.responses[:1], *rollout.responses[2:]),
            finish_reasons=(
                rollout.finish_reasons[0],
                rollout.finish_reasons[0],
                *rollout.finish_reasons[2:],
            ),
        )

    record_with(world, change)


@fault("stop token trained as context", "mask", engine=ENGINE)
def stop_as_context(world: World) -> None:
    def change(rollout: Rollout) -> Rollout:
        masks, logprobs = by_row(rollout, rollout.loss_mask), by_row(rollout, rollout.logprobs)
        for row, reason in enumerate(rollout.finish_reasons):
            if reason == "stop":
                masks[row][-1], logprobs[row][-1] = 0, 0.0
        return replaced(rollout, loss_mask=masks, logprobs=logprobs)

    record_with(world, change)


@fault("truncated sample recorded as finished", "end", engine=ENGINE)
def truncated(world: World) -> None:
    record_with(
        world,
        lambda rollout: msgspec.structs.replace(
            rollout, finish_reasons=tuple("stop" for _ in rollout.finish_reasons)
        ),
    )


@fault("version of a skewed clock", "logprob", engine=ENGINE)
def skewed(world: World) -> None:
    """Record the version before the one that sampled the tokens."""

    def change(rollout: Rollout) -> Rollout:
        spans = rollout.spans.numpy().copy()
        spans[:, 2] = np.maximum(spans[:, 2] - 1, 0)
        return msgspec.structs.replace(rollout, spans=Array.of(spans, "int32"))

    record_with(world, change)


@fault("reward to the neighbour", "reward", scorer="reward.0")
def neighbour(world: World) -> None:
    world.score = lambda rollout: list(np.roll(rewards_of(rollout), 1))


@fault("judge's answer of another prompt", "reward", scorer="reward.0")
def judge_cache(world: World) -> None:
    """Keep answers by the length of the response, without the prompt."""
    cache: dict[int, float] = {}
    world.score = lambda rollout: [
        cache.setdefault(len(text), reward)
        for text, reward in zip(rollout.responses, rewards_of(rollout), strict=True)
    ]


@fault("evaluation on the training set", "evaluation", set="held_out")
def trained_prompts(world: World) -> None:
    world.held_out = lambda world: [world.source.at(index) for index in range(20)]


@fault("evaluation of another version", "evaluation", set="held_out")
def other_version(world: World) -> None:
    kept = world.digest
    world.scored = lambda world: kept
