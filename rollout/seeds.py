"""Derives seeds for parts of a run from the run's seed."""

import xxhash


def seed_within(seed: int | None, place: int) -> int | None:
    """Return a seed that depends only on the parent `seed` and the part's index; None if `seed` is None.

    Args:
        seed: seed of the whole, or None for unseeded sampling.
        place: index of the part: group number, sample index in the group, or call number.
    """
    return None if seed is None else xxhash.xxh3_64_intdigest(f"{seed} {place}".encode()) >> 1
