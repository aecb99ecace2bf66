"""Parsers in a process of their own: those of the engines, and one that hangs, dies and refuses."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from rollout.sessions.answers import parser_process
from rollout.sessions.answers.parser_process import ParserProcess
from rollout.sessions.answers.reader import AnswerReader, ReadAnswer
from tests.contracts.sglang_environment import STAND_INS, sglang_python
from tests.rollout.sessions.chats import renderer

TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
STAND_IN = f"""#!{sys.executable}
import os, time
from rollout.engines.answer_lines import check_names, serve_lines

def load(given):
    check_names("sglang", given, {{"tools": ["upper"], "reasoning": []}})
    def parse(asked):
        if asked["text"] == "hang":
            time.sleep(1000)
        if asked["text"] == "die":
            os._exit(1)
        if asked["text"] == "raise":
            raise RuntimeError
        print("noise on standard output")
        arguments = "no object" if asked["text"] == "odd" else "{{}}"
        return {{"thoughts": "", "content": asked["text"].upper(), "calls": [("add", arguments)]}}
    return parse

serve_lines(load)
"""


@pytest.fixture
async def stand_in(tmp_path: Path) -> AsyncIterator[AnswerReader]:
    """A reader whose interpreter has no SGLang, but a parser that behaves as answers say."""
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    reader = AnswerReader("sglang:upper", "none", str(python))
    yield reader
    await reader.close()
    await reader.close()


async def read(reader: AnswerReader, said: str) -> ReadAnswer:
    text = renderer("none")
    return await reader.read(text, text.encode(said), (), [TOOL])


async def test_an_answer_whose_parser_fails_is_text(
    stand_in: AnswerReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parser_process, "PARSE_S", 5.0)
    good = ReadAnswer("ABC", "", (("add", {}),))
    assert await read(stand_in, "abc") == good
    for said in ("raise", "odd", "die", "hang"):
        assert await read(stand_in, said) == ReadAnswer(said)
        assert await read(stand_in, "abc") == good


async def test_a_parser_that_raises_is_not_started_again(stand_in: AnswerReader) -> None:
    await read(stand_in, "abc")
    assert stand_in._process is not None
    process = stand_in._process._process
    assert await read(stand_in, "raise") == ReadAnswer("raise")
    assert stand_in._process._process is process is not None


async def test_answers_are_not_mixed_up_when_a_call_is_cancelled(stand_in: AnswerReader) -> None:
    await read(stand_in, "abc")
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(read(stand_in, "first"))
        second = tasks.create_task(read(stand_in, "second"))
        await asyncio.sleep(0)
        first.cancel()
    assert second.result().content == "SECOND"


def test_an_unknown_parser_is_refused_with_those_that_exist(stand_in: AnswerReader, tmp_path: Path) -> None:
    stand_in.check("")
    stand_in.check(str(tmp_path))
    python = str(tmp_path / "python")
    with pytest.raises(SettingsError, match="no parser for tools named 'lower'; it has upper"):
        AnswerReader("sglang:lower", "none", python).check("")
    with pytest.raises(SettingsError, match="cannot be started"):
        AnswerReader("sglang:upper", "none", str(tmp_path / "nothing")).check("")


PARSERS = [
    pytest.param("vllm", ("hermes", "deepseek_r1"), "", id="vllm"),
    pytest.param("sglang", ("qwen25", "deepseek-r1"), sglang_python(), id="sglang"),
]


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize(("engine", "names", "python"), PARSERS)
async def test_the_parsers_of_an_engine_read_thoughts_and_calls(
    engine: str, names: tuple[str, str], python: str, tmp_path: Path
) -> None:
    text = renderer("forgets thoughts")
    text._tokenizer.add_tokens(["<think>", "</think>"])
    text._tokenizer.save_pretrained(tmp_path)
    text.model_dir = tmp_path
    tools, thoughts = names
    variables = {"PYTHONPATH": str(STAND_INS)}
    with pytest.raises(
        SettingsError, match=f"{engine} has no parser for tools named 'herms'; it has .*{tools}"
    ):
        ParserProcess(engine, {"tools": "herms", "reasoning": ""}, python, variables).check("")
    reader = AnswerReader(f"{engine}:{tools}", f"{engine}:{thoughts}", python, variables)
    try:
        said = text.encode(f"<think>hm</think>so {CALL}")
        found = await reader.read(text, said, (), [TOOL])
        assert (found.thoughts, found.content.strip(), found.calls) == ("hm", "so", (("add", {"a": 1}),))
        broken = text.encode("<think>hm</think>just text")
        assert (await reader.read(text, broken, (), [TOOL])).content == "just text"
    finally:
        await reader.close()
