"""Mutates documents and keeps them well-formed: most flipped bytes are refused at once."""

import random
from collections.abc import Callable, Sequence
from typing import Any

MOST_NODES = 4096
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2, 255, -(1 << 31), 1 << 31, (1 << 53) + 1, (1 << 63) - 1, -(1 << 63),
    (1 << 64) - 1, 0.5, -0.0, 1e308,
    float("inf"), float("nan"), "", "a", "\x00", "../../x", "9" * 5000, "é" * 40, "[", [], {}, [[]],
    {"": None},
)  # fmt: skip
"""Values that code forgets."""


def changed(value: Any, chance: random.Random, extra: tuple[Any, ...] = ()) -> Any:
    """Return `value` with one node replaced, removed, repeated or wrapped; it may be changed in place."""
    places = list(_places(value))
    if not places:
        return chance.choice(ODD)
    owner, key = chance.choice(places)
    node = owner[key]
    match chance.randrange(6):
        case 0:
            del owner[key]
        case 1:
            owner[key] = [node] * chance.choice((1, 2, 50))
        case 2 if isinstance(owner, list):
            owner.insert(key, chance.choice((*ODD, node, *extra)))
        case 3:
            owner[key] = owner[chance.choice(list(owner) if isinstance(owner, dict) else range(len(owner)))]
        case 4 if isinstance(node, int):
            owner[key] = max(
                -(1 << 63), min((1 << 64) - 1, node + chance.choice((-1, 1, -node * 2, node, 1 << 32)))
            )
        case 4 if isinstance(node, bytes):
            owner[key] = node[: chance.randrange(len(node) + 1)] + bytes(chance.randrange(9))
        case _:
            owner[key] = chance.choice((*ODD, *extra))
    return value


def _places(value: Any) -> Any:
    """Return every (container, key) in a document, breadth first."""
    waiting, seen = [value], 0
    while waiting and seen < MOST_NODES:
        owner = waiting.pop(0)
        keys = (
            list(owner) if isinstance(owner, dict) else range(len(owner)) if isinstance(owner, list) else ()
        )
        for key in keys:
            seen += 1
            yield owner, key
            waiting.append(owner[key])


def mutator(
    load: Callable[[bytes], Any],
    dump: Callable[[Any], bytes],
    bytewise: Callable[[bytes, int], bytes],
    seeds: Sequence[bytes],
) -> Any:
    """Return a libFuzzer mutator for documents that `load` reads.

    Half of the time it changes a node, else bytes. Half of the time it begins with a seed: decoders in C show
    libFuzzer no branches, so it keeps only the shortest inputs.
    """

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        chance = random.Random(seed)
        if chance.random() < 0.5:
            data = chance.choice(seeds)
        if chance.random() < 0.5:
            try:
                value = load(data)
                for _ in range(chance.choice((1, 1, 2, 5))):
                    value = changed(value, chance)
                made = dump(value)
            except Exception:  # not such a document, or no longer one that can be written
                return bytewise(data, max_size)
            if len(made) <= max_size:
                return made
        return bytewise(data, max_size)

    return mutate
