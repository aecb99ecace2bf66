"""Writes small Python programs: a seed selects functions on lists of integers, and their constants."""

import random

TEMPLATES = {
    "longest_run": """
def longest_run(values):
    best = run = 0
    for value in values:
        run = run + 1 if value > {a} else 0
        best = max(best, run)
    return best
""",
    "clipped_sum": """
def clipped_sum(values):
    total = 0
    for value in values:
        total += min(max(value, -{a}), {b})
    return total
""",
    "largest_gap": """
def largest_gap(values):
    ordered = sorted(values)
    gap = 0
    for left, right in zip(ordered, ordered[1:]):
        if right - left > gap:
            gap = right - left
    return gap * {a}
""",
    "digit_sum": """
def digit_sum(values):
    total = 0
    for value in values:
        rest = abs(value)
        for _ in range(12):
            total += rest % {c}
            rest //= {c}
    return total
""",
    "peaks": """
def peaks(values):
    found = 0
    for i in range(1, len(values) - 1):
        if values[i - 1] < values[i] and values[i] >= values[i + 1] + {d}:
            found += 1
    return found
""",
    "moving_maximum": """
def moving_maximum(values):
    total = 0
    for i in range(len(values) - {a} + 1):
        total += max(values[i:i + {a}])
    return total
""",
    "pairs": """
def pairs(values):
    count = 0
    for i in range(len(values)):
        for j in range(i + 1, len(values)):
            if (values[i] + values[j]) % {c} == {d}:
                count += 1
    return count
""",
    "second_largest": """
def second_largest(values):
    first = second = -{big}
    for value in values:
        if value > first:
            first, second = value, first
        elif value > second and value != first:
            second = value
    return second
""",
    "inversions": """
def inversions(values):
    count = 0
    for i, left in enumerate(values):
        for right in values[i + 1:]:
            if left - right > {d}:
                count += {a}
    return count
""",
    "weighted": """
def weighted(values):
    total = 0
    for i, value in enumerate(values):
        if i % {a} == 0:
            total += value * (i + {b})
        else:
            total -= value
    return total
""",
    "median": """
def median(values):
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return ordered[middle] + {d}
    return (ordered[middle - 1] + ordered[middle]) // 2 + {d}
""",
    "balance": """
def balance(values):
    left, best = 0, {big}
    for value in values[:-1]:
        left += value
        best = min(best, abs(2 * left - sum(values)))
    return best % {big}
""",
}
"""Name -> function template; a seed sets its constants. All loops terminate for all constants."""


def program(generator: random.Random, functions: int) -> str:
    """Return a program with `functions` functions, and `solve`, which adds their results."""
    names = generator.sample(sorted(TEMPLATES), functions)
    numbers = {"a": generator.randint(2, 4), "b": generator.randint(2, 9), "c": generator.randint(3, 9)}
    parts = [
        TEMPLATES[name].format(d=generator.randint(0, 2), big=generator.randint(500, 999), **numbers)
        for name in names
    ]
    total = " + ".join(f"{name}(values)" for name in names)
    return "\n".join([*parts, f"\ndef solve(values):\n    return {total}\n"]).lstrip("\n")


def inputs(generator: random.Random, count: int) -> list[list[int]]:
    """Return `count` lists of integers as arguments of `solve`."""
    return [[generator.randint(-20, 20) for _ in range(generator.randint(5, 9))] for _ in range(count)]
