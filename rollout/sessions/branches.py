"""Builds the rows of a sample from its session's calls; each sampled token is in exactly one row."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rollout.engines.requests import spans_of
from rollout.sample import Branch
from rollout.sessions.calls import CallTree, ModelCall, context_tokens


def branches_of(tree: CallTree) -> tuple[Branch, ...]:
    """Return the rows of a session's sample, in the order of their first calls.

    A row starts after the prefix that it shares with an earlier row. The prefix contains at least the tokens
    of the call that the row continues, and at most the context of the row's first call. Two answers that
    start with the same tokens are therefore both kept.
    """
    branches: list[Branch] = []
    full: list[NDArray[np.int64]] = []
    places = {id(call): place for place, call in enumerate(tree.calls)}
    for row in tree.rows():
        context = np.array(context_tokens(row[0].parent, row[0].inserted), dtype=np.int64)
        parent, shared = _longest_shared(context, full)
        order = [places[id(call)] for call in row]
        branch = _branch(row, context[shared:].tolist(), parent, shared, order)
        before = full[parent][:shared] if parent >= 0 else context[:0]
        full.append(np.concatenate([before, np.array(branch.tokens, dtype=np.int64)]))
        branches.append(branch)
    return tuple(branches)


def _longest_shared(context: NDArray[np.int64], rows: Sequence[NDArray[np.int64]]) -> tuple[int, int]:
    """Return (index, length) of the row with the longest common prefix; (-1, 0) if there are no rows."""
    best = (-1, 0)
    for index, row in enumerate(rows):
        n = min(len(row), len(context))
        different = np.flatnonzero(row[:n] != context[:n])
        shared = int(different[0]) if len(different) else n
        if best[0] < 0 or shared > best[1]:
            best = (index, shared)
    return best


def _branch(
    row: Sequence[ModelCall], context: Sequence[int], parent: int, shared: int, places: Sequence[int]
) -> Branch:
    """Return the row of a sequence of calls.

    Args:
        row: calls that continue one another.
        context: unshared tokens of the first call's context.
        parent, shared: as in `Branch`.
        places: indices of the calls in the session.
    """
    tokens: list[int] = []
    logprobs: list[float] = []
    mask: list[int] = []
    versions: list[int] = []
    calls: list[tuple[int, int, int]] = []
    turns: list[tuple[int, int, int]] = []
    for call, place in zip(row, places, strict=True):
        inserted, sampled = context if call is row[0] else call.inserted, call.completion
        sampled_versions = [
            version
            for (first, _), (end, version) in pairwise([(0, 0), *sampled.spans])
            for _ in range(first, end)
        ]
        tokens += (*inserted, *sampled.tokens)
        calls += [(call.number, len(tokens) - len(sampled.tokens), len(tokens))] * (call.number >= 0)
        turns.append((place, len(tokens) - len(sampled.tokens), len(tokens)))
        own = sampled.logprobs if call.trained else [0.0] * len(sampled.tokens)
        logprobs += (*[0.0] * len(inserted), *own)
        mask += (*[0] * len(inserted), *[int(call.trained)] * len(sampled.tokens))
        # An inserted token has the version of the token before it; at the start, of the first sampled token.
        versions += (*[versions[-1] if versions else sampled_versions[0]] * len(inserted), *sampled_versions)
    return Branch(
        tuple(tokens), tuple(logprobs), tuple(mask), spans_of(versions), parent, shared, tuple(calls),
        tuple(turns),
    )  # fmt: skip
