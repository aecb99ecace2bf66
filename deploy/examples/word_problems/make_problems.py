"""Writes word problems in GSM8K's format with worked solutions, reproducibly.

A problem describes changes to a number of things: two or three events of EVENTS in sequence. A fifth of these
sequences occurs in no training problem; `new_stories.jsonl` consists of them. `new_numbers.jsonl` has other
numbers in the sequences of training. Every row has `question`, `solution` (a line per event, then `#### ` and
the answer) and `answer`.

usage: python deploy/examples/word_problems/make_problems.py DIRECTORY
"""

import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

SEED = 0
TRAINING, HELD_OUT = 8_000, 300
"""Number of problems in the training file, and in each held-out file."""
LARGEST = 200
"""Largest number in a problem."""
NAMES = ("Ava", "Ben", "Chloe", "Dan", "Ella", "Finn", "Grace", "Hugo", "Ivy", "Jack", "Lena", "Max")
THINGS = ("apples", "books", "cards", "coins", "eggs", "marbles", "pencils", "shells", "stamps", "stickers")
OPENINGS = ("{name} has {count} {things}.", "At first {name} owns {count} {things}.")
QUESTIONS = (
    "How many {things} does {name} have now?",
    "How many {things} are left to {name} at the end?",
)


class Event(NamedTuple):
    """Text and effect of one event in a story."""

    text: str
    work: str
    """Line of the solution, without its result."""
    count: int
    """Number of things after the event."""


Happening = Callable[[int, random.Random], Event | None]
"""(things before the event, random generator) -> event; None if it is impossible with that number."""


def _buys(count: int, rng: random.Random) -> Event:
    more = rng.randint(2, 40)
    sentence = rng.choice(("{name} buys {k} more.", "A friend gives {name} {k} more {things}."))
    return Event(sentence.replace("{k}", str(more)), f"{count} + {more}", count + more)


def _gives(count: int, rng: random.Random) -> Event | None:
    if count < 4:
        return None
    fewer = rng.randint(2, min(40, count - 1))
    sentence = rng.choice(("{name} gives {k} of them away.", "Then {name} loses {k} of the {things}."))
    return Event(sentence.replace("{k}", str(fewer)), f"{count} - {fewer}", count - fewer)


def _multiplies(count: int, rng: random.Random) -> Event:
    word, times = rng.choice((("doubles", 2), ("triples", 3)))
    return Event(f"In the next month this number {word}.", f"{count} * {times}", count * times)


def _halves(count: int, rng: random.Random) -> Event | None:
    sentence = rng.choice(("Half of the {things} break.", "{name} sells half of them."))
    return None if count % 2 else Event(sentence, f"{count} / 2", count // 2)


def _shares(count: int, rng: random.Random) -> Event | None:
    numbers = [k for k in range(3, 7) if count % k == 0]
    if not numbers:
        return None
    people = rng.choice(numbers)
    sentence = f"The {{things}} are shared equally among {people} people, and {{name}} is one of them."
    return Event(sentence, f"{count} / {people}", count // people)


def _boxes(count: int, rng: random.Random) -> Event:
    boxes, each = rng.randint(2, 6), rng.randint(2, 9)
    sentence = f"{{name}} gets {boxes} boxes with {each} {{things}} in each."
    return Event(sentence, f"{count} + {boxes} * {each}", count + boxes * each)


def _days(count: int, rng: random.Random) -> Event | None:
    days, each = rng.randint(2, 6), rng.randint(2, 6)
    sentence = f"For {days} days {{name}} uses {each} {{things}} a day."
    return Event(sentence, f"{count} - {days} * {each}", count - days * each) if days * each < count else None


EVENTS: tuple[Happening, ...] = (_buys, _gives, _multiplies, _halves, _shares, _boxes, _days)
Story = tuple[Happening, ...]


def stories() -> tuple[list[Story], list[Story]]:
    """Return the sequences of two and three events: four fifths for training, one fifth held out."""
    all_stories = [story for length in (2, 3) for story in itertools.product(EVENTS, repeat=length)]
    random.Random(SEED).shuffle(all_stories)
    return all_stories[len(all_stories) // 5 :], all_stories[: len(all_stories) // 5]


def problem(story: Story, rng: random.Random) -> dict[str, str] | None:
    """Tell a story with new numbers; return None if an event is impossible with them."""
    names = {"name": rng.choice(NAMES), "things": rng.choice(THINGS)}
    count = rng.randint(5, 60)
    sentences = [rng.choice(OPENINGS).replace("{count}", str(count))]
    lines = []
    for happening in story:
        event = happening(count, rng)
        if event is None or event.count > LARGEST:
            return None
        count = event.count
        sentences.append(event.text)
        lines.append(f"{event.work} = {count}")
    question = " ".join([*sentences, rng.choice(QUESTIONS)]).format(**names)
    return {"question": question, "solution": "\n".join([*lines, f"#### {count}"]), "answer": str(count)}


def problems(story_pool: list[Story], rng: random.Random, seen: set[str]) -> Iterator[dict[str, str]]:
    """Yield problems of these stories endlessly; skip questions in `seen`, and add new ones to it."""
    while True:
        row = problem(rng.choice(story_pool), rng)
        if row and row["question"] not in seen:
            seen.add(row["question"])
            yield row


def write(directory: Path) -> None:
    """Write train.jsonl, new_numbers.jsonl and new_stories.jsonl."""
    directory.mkdir(parents=True, exist_ok=True)
    trained, held_out = stories()
    rng = random.Random(SEED + 1)
    seen: set[str] = set()
    for name, story_pool, count in (
        ("train", trained, TRAINING),
        ("new_numbers", trained, HELD_OUT),
        ("new_stories", held_out, HELD_OUT),
    ):
        rows = itertools.islice(problems(story_pool, rng, seen), count)
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: make_problems.py DIRECTORY")
    write(Path(sys.argv[1]))
