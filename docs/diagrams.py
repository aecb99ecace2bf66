"""Draws docs/diagrams/*.svg from the tables of `protocol`: `python docs/diagrams.py` writes them."""

from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path

from protocol.lifecycle import TRANSITIONS, Event, GroupState
from protocol.topics import TOPICS

FOLDER = Path(__file__).with_name("diagrams")
Point = tuple[float, float]
STYLE = """\
.page { fill: #ffffff; } .box { fill: #eef2fb; stroke: #3f51b5; stroke-width: 1.5; }
.line { stroke: #3f51b5; fill: none; stroke-width: 1.5; } .faint { stroke-dasharray: 5 4; }
.head { fill: #3f51b5; } .name { font-weight: 600; } .note { fill: #55607a; font-size: 12px; }
text { font: 14px sans-serif; fill: #1c2333; text-anchor: middle; }
text { stroke: #ffffff; stroke-width: 5px; paint-order: stroke; } .inside { stroke: none; }
@media (prefers-color-scheme: dark) {
  .page { fill: #151a26; } .box { fill: #222b45; stroke: #9fa8da; } .line { stroke: #9fa8da; }
  .head { fill: #9fa8da; } text { fill: #e6e9f2; stroke: #151a26; } .note { fill: #aab3cc; }
}"""


def page(title: str, width: int, height: int, shapes: Iterable[str]) -> str:
    """Return a drawing as the text of an SVG file; light or dark as the reader's system is."""
    arrow = (
        '<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
        'orient="auto"><path class="head" d="M0 0 10 5 0 10z"/></marker>'
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{STYLE}\n</style>",
            f"<defs>{arrow}</defs>",
            f'<rect class="page" width="{width}" height="{height}" rx="8"/>',
            *shapes,
            "</svg>\n",
        ]
    )


def text(at: Point, words: str, kind: str = "") -> str:
    """Return a line of text whose middle is at a point."""
    return f'<text class="{kind}" x="{at[0]:g}" y="{at[1]:g}">{escape(words)}</text>'


def box(middle: Point, name: str, note: str = "", width: float = 160, height: float = 60) -> str:
    """Return a box with a name and a note."""
    x, y = middle
    corner = f'x="{x - width / 2:g}" y="{y - height / 2:g}" width="{width:g}" height="{height:g}"'
    lines = [text((x, y - 3 if note else y + 5), name, "name inside")]
    return "\n".join(
        [
            f'<rect class="box" {corner} rx="6"/>',
            *lines,
            *([text((x, y + 16), note, "note inside")] if note else []),
        ]
    )


def arrow(path: str, faint: bool = False) -> str:
    """Return an arrow along an SVG path."""
    return f'<path class="line{" faint" if faint else ""}" marker-end="url(#head)" d="{path}"/>'


SERVICES = {
    "rollout": ((140, 90), "vLLM, SGLang, agents"),
    "reward": ((400, 90), "verifiers, judges"),
    "ingest": ((660, 90), "one fsync for many"),
    "ledger": ((400, 240), "Redis or Valkey"),
    "trainer": ((660, 380), "Megatron-core"),
    "monitor": ((400, 380), "read-only page"),
}
EDGES = {
    "rollouts": ("M220 90H318", (270, 82)),
    "scored": ("M480 90H578", (530, 82)),
    "calls": ("M140 60V28H660V58", (400, 20)),
    "weights": ("M660 410V450H140V122", (400, 442)),
}
"""Topic of the bus -> path of its arrow, place of its name."""
LEDGER_CALLS = (
    ("M215 120 318 218", "leases", (240, 180)),
    ("M585 120 482 218", "accepts", (562, 180)),
    ("M582 360 482 262", "takes, commits", (590, 310)),
    ("M400 270V348", "status", (430, 314)),
)


def architecture() -> str:
    """Draw the services of a run, the topics of the bus, and who calls the ledger."""

    def shapes() -> Iterator[str]:
        for name, (middle, note) in SERVICES.items():
            yield box(middle, name, note)
        for topic in TOPICS.values():
            path, place = EDGES[topic.name]
            yield arrow(path)
            yield text(place, topic.name)
        yield text((400, 466), "staged while engines generate, committed between two decode steps", "note")
        yield arrow("M660 120V348")
        yield text((660, 240), "spool (SQLite)")
        for path, words, place in LEDGER_CALLS:
            yield arrow(path, faint=True)
            yield text(place, words, "note")

    return page("The services of a run and what they send to each other", 800, 485, shapes())


PLACES: dict[GroupState, Point] = {
    GroupState.WAITING: (90, 230),
    GroupState.LEASED: (290, 230),
    GroupState.SCORED: (490, 230),
    GroupState.TAKEN: (690, 230),
    GroupState.TRAINED: (890, 230),
    GroupState.DROPPED: (490, 370),
}


def group_life() -> str:
    """Draw every transition of the table of a group's lifecycle."""
    moves: dict[tuple[GroupState, GroupState], list[Event]] = {}
    for start, row in TRANSITIONS.items():
        for event, end in row.items():
            moves.setdefault((start, end), []).append(event)

    def shapes() -> Iterator[str]:
        for (start, end), events in moves.items():
            yield from _move(PLACES[start], PLACES[end], ", ".join(events))
        for state, middle in PLACES.items():
            yield box(middle, state.value, width=110, height=44)

    return page("The life of a prompt group: states and events", 980, 420, shapes())


def _move(start: Point, end: Point, words: str) -> Iterator[str]:
    """Draw one transition: forward straight, back in an arc above, to itself and to `dropped` below."""
    (x, y), (u, v) = start, end
    if start == end:
        yield arrow(f"M{x + 20:g} {y + 22:g}c0 50 -40 50 -40 3")
        yield text((x, y + 76), words)
    elif v > y and u - x > 300:
        yield arrow(f"M{x:g} {y + 22:g}C{x:g} {v:g} {x + 100:g} {v:g} {u - 57:g} {v:g}")
        yield text(((x + u) / 2, v - 6), words)
    elif v > y:
        yield arrow(f"M{x:g} {y + 22:g} {u + (x - u) * 0.15:g} {v - 24:g}")
        yield text(((x + u) / 2 + 20, (y + v) / 2), words)
    elif u > x:
        yield arrow(f"M{x + 55:g} {y:g}H{u - 57:g}")
        yield text(((x + u) / 2, y - 8), words)
    else:
        height = 60 + 0.17 * (x - u)
        yield arrow(
            f"M{x - 12:g} {y - 22:g}C{x - 30:g} {y - height:g} {u + 30:g} {y - height:g} {u + 8:g} {y - 24:g}"
        )
        yield text(((x + u) / 2, y - 30 - 0.75 * (height - 22)), words)


LIFELINES = {"trainer": 150, "ledger": 480, "engine": 810}
STEPS = (
    ("trainer", "trainer", "exports v + 1, with digests"),
    ("trainer", "ledger", "commit: v + 1, groups, manifest"),
    ("trainer", "engine", "weights: the manifest"),
    ("engine", "engine", "stages a copy while it generates under v"),
    ("engine", "engine", "checks names, shapes, dtypes, digests"),
    ("engine", "ledger", "is this epoch still the run's?"),
    ("engine", "engine", "commits between two decode steps"),
    ("engine", "ledger", "applied: leases are of v + 1 from here"),
)
"""From, to, and what happens, in order."""


def stage_and_commit() -> str:
    """Draw the way of a new version from the trainer into an engine that generates."""
    top, distance = 110, 46
    bottom = top + distance * len(STEPS)

    def shapes() -> Iterator[str]:
        for name, x in LIFELINES.items():
            yield box((x, 45), name, height=44)
            yield f'<path class="line faint" d="M{x} 67V{bottom}"/>'
        for i, (start, end, words) in enumerate(STEPS):
            y, x, u = top + distance * i, LIFELINES[start], LIFELINES[end]
            if start == end:
                yield f'<circle class="head" cx="{x}" cy="{y}" r="5"/>'
                yield text((min(max(x, 200), 800), y - 12), f"{i + 1}. {words}")
            else:
                yield arrow(f"M{x} {y}H{u + (4 if u < x else -4)}")
                yield text(((x + u) / 2, y - 8), f"{i + 1}. {words}")

    return page("A new version of the weights: stage, then commit", 960, bottom + 20, shapes())


DRAWINGS = {"architecture": architecture, "group": group_life, "weights": stage_and_commit}
"""Name of the file -> what draws it."""


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in DRAWINGS.items():
        (FOLDER / f"{name}.svg").write_text(draw())
