"""Checks drawings, the API page and the table of commands against the code."""

from pathlib import Path

import pytest

from protocol.lifecycle import TRANSITIONS
from protocol.topics import TOPICS
from services.cli import app
from tests.docs.pages import DOCS, program


@pytest.mark.parametrize("name", ["architecture", "group", "weights"])
def test_drawing_is_current(name: str) -> None:
    drawn = program("diagrams").DRAWINGS[name]()
    assert (DOCS / f"diagrams/{name}.svg").read_text() == drawn, "run `python docs/diagrams.py`"


def test_drawings_show_every_topic_state_and_event() -> None:
    drawings = program("diagrams")
    assert all(f">{topic}</text>" in drawings.architecture() for topic in TOPICS)
    group = drawings.group_life()
    assert all(state.value in group for state in TRANSITIONS)
    assert all(event.value in group for row in TRANSITIONS.values() for event in row)


def test_api_page_is_current() -> None:
    assert (DOCS / "api.md").read_text() == program("api_page").render(), "run `python docs/api_page.py`"


def test_api_page_has_every_member_that_it_selects() -> None:
    page = program("api_page")
    text = page.render()
    for classes in page.CLASSES.values():
        for module, name, members in classes:
            assert (Path(page.ROOT) / module).is_file()
            section = text.partition(f"### {name}\n")[2].partition("\n### ")[0]
            assert all(
                f"#### `{member}" in section or f"#### `async {member}" in section for member in members or ()
            )


def test_tables_of_refused_arguments_are_current() -> None:
    page = (DOCS / "engines.md").read_text()
    assert page == program("engine_arguments").render(page), "run `python docs/engine_arguments.py`"


def test_page_of_refusals_is_current() -> None:
    assert (DOCS / "refusals.md").read_text() == program("refusals").render(), "run `python docs/refusals.py`"


def test_page_of_refusals_has_rows_of_every_module_and_of_both_forms() -> None:
    refusals = program("refusals")
    for modules in refusals.SECTIONS.values():
        for module in modules:
            assert list(refusals._rows([module])), module
    page = refusals.render()
    engines = "hf or megatron or sglang or sglang_jax or vllm"
    assert f"| `colocated.enabled` | engine *engine* cannot sleep | use {engines} |" in page
    assert "| `sampling.top_p` | the engine would sample from the tokens that it keeps" in page
    assert all(f"`{name}`" in page for name in refusals.UNCHANGED)


def test_commands_page_has_every_command() -> None:
    page = (DOCS / "commands.md").read_text()
    names = [
        command.name or command.callback.__name__ for command in app.registered_commands if command.callback
    ]
    assert len(names) > 10
    assert [name for name in names if f"| `tether {name} " not in page] == []
