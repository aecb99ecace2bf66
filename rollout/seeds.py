"""Gives each part of a run a seed of its own, from one seed."""

import xxhash


def seed_within(seed: int | None, place: int) -> int | None:
    """Return the seed of one part, which depends on `seed` and on the part's place alone.

    Args:
        seed: of the whole; None: it has none, and neither has a part.
        place: of the part: a group's number, a sample's index in its group, the number of a call.
    """
    return None if seed is None else xxhash.xxh3_64_intdigest(f"{seed} {place}".encode()) >> 1
