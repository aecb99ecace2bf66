"""Parses thoughts and tool calls from the text of an answer; the answer's tokens never change.

A syntax is built in, or ENGINE:NAME for a parser of vLLM or SGLang. Engine parsers run in a child process, in
the interpreter that has the engine (`parser_process.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from protocol.choices import checked_name
from protocol.errors import SettingsError
from rollout.bounded_json import parsed_json
from rollout.off_loop import TOKEN, off_loop
from rollout.render import Renderer
from rollout.sessions.answers.parser_process import MODULES, ParserProcess
from rollout.sessions.answers.tool_calls import PARSERS, Found

REASONING = ("none", "think")
"""Built-in syntaxes of thoughts."""
BEFORE = 64
"""Number of tokens before an answer to search for an opening tag of thoughts."""


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """Parts of a model's answer."""

    content: str
    thoughts: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    """(name, arguments) of each tool call."""


class AnswerReader:
    """Answer parser with a tool call syntax and a reasoning syntax, shared by all sessions of a process."""

    def __init__(
        self,
        tool_syntax: str = "hermes",
        reasoning_syntax: str = "none",
        python: str = "",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Check the syntax names. Engine parsers start with the first answer; `check` validates them.

        Args:
            tool_syntax: syntax of the model's tool calls.
            reasoning_syntax: syntax of the model's thoughts.
            python: interpreter with SGLang; empty: this interpreter.
            variables: environment variables for SGLang.

        Raises:
            SettingsError: a syntax is unknown, or the syntaxes belong to different engines.
        """
        self._tools, self._thoughts = tool_syntax, reasoning_syntax
        engines = {
            _checked(tool_syntax, tuple(PARSERS), "tool_syntax"),
            _checked(reasoning_syntax, REASONING, "reasoning_syntax"),
        } - {""}
        if len(engines) > 1:
            raise SettingsError(
                f"setting environment.options.reasoning_syntax: {reasoning_syntax!r} is of another engine "
                f"than tool_syntax {tool_syntax!r}; use parsers of one"
            )
        self._process: ParserProcess | None = None
        if engines:
            names = {
                kind: name.partition(":")[2] if ":" in name else ""
                for kind, name in (("tools", tool_syntax), ("reasoning", reasoning_syntax))
            }
            self._process = ParserProcess(engines.pop(), names, python, variables or {})

    def check(self, model_dir: str) -> None:
        """Check that the engine's parsers exist, and accept the tokenizer if `model_dir` is not empty.

        Raises:
            SettingsError: a parser is unknown or rejects the tokenizer; the message lists the valid parsers.
        """
        if self._process is not None:
            self._process.check(model_dir)

    async def read(
        self,
        renderer: Renderer,
        tokens: tuple[int, ...],
        before: Sequence[int],
        tools: Sequence[dict[str, Any]],
    ) -> ReadAnswer:
        """Parse an answer; unparsable parts remain text.

        Args:
            before: tokens inserted before the answer.
            tools: functions that the model may call; empty: tool calls are not parsed.
        """
        last, size = tuple(before[-BEFORE:]), TOKEN * len(tokens)
        by_engine = (":" in self._tools and bool(tools)) or ":" in self._thoughts
        if not by_engine or self._process is None:
            return await off_loop(
                size, lambda: self._by_ours(ReadAnswer(renderer.text(tokens)), renderer, tokens, last, tools)
            )
        text, marked = await off_loop(size, lambda: (renderer.text(tokens), renderer.marked(tokens)))
        request = {
            "text": text, "marked": marked, "tokens": tokens, "before": last,
            "opened": renderer.marked(last), "tools": list(tools),
        }  # fmt: skip
        parsed = await self._process.parsed(request, str(renderer.model_dir))
        read = await off_loop(size, lambda: _read(parsed, text))
        if ":" in self._tools or not tools:
            return read
        return await off_loop(size, lambda: self._by_ours(read, renderer, tokens, last, tools))

    def _by_ours(
        self,
        read: ReadAnswer,
        renderer: Renderer,
        tokens: tuple[int, ...],
        last: tuple[int, ...],
        tools: Sequence[dict[str, Any]],
    ) -> ReadAnswer:
        """Apply the built-in syntaxes to a partially parsed answer."""
        text, thoughts = read.content, read.thoughts
        if self._thoughts == "think":
            thoughts, text = _think(text, renderer.marked(last), renderer.marked(tokens))
        if not tools or ":" in self._tools:
            return ReadAnswer(text, thoughts)
        content, calls = PARSERS[self._tools](text)
        return ReadAnswer(content, thoughts, tuple(calls))

    async def close(self) -> None:
        """End the parser process, if any. Idempotent."""
        if self._process is not None:
            await self._process.close()


def _checked(name: str, own: tuple[str, ...], option: str) -> str:
    """Return the engine of a syntax ENGINE:NAME; empty for a built-in syntax."""
    what = f"setting environment.options.{option}:"
    engine, found, parser = name.partition(":")
    if not found:
        checked_name(name, own, what)
        return ""
    checked_name(engine, tuple(MODULES), f"{what} {name!r}: engine")
    if not parser:
        raise SettingsError(f"{what} {name!r} names no parser; write it as {engine}:NAME")
    return engine


def _read(parsed: dict[str, Any] | None, text: str) -> ReadAnswer:
    """Return the engine parser's result; the whole text if parsing failed or a tool call is malformed."""
    if parsed is None:
        return ReadAnswer(text)
    calls: Found = []
    try:
        for name, arguments in parsed["calls"]:
            found = parsed_json(arguments or "{}")
            if not isinstance(found, dict) or not isinstance(name, str):
                return ReadAnswer(text)
            calls.append((name, found))
        return ReadAnswer(parsed["content"] or "", parsed["thoughts"] or "", tuple(calls))
    except (ValueError, TypeError, KeyError, RecursionError):
        return ReadAnswer(text)


def _think(text: str, before: str, marked: str) -> tuple[str, str]:
    """Return (thoughts, text) of an answer with thoughts between <think> tags.

    The opening tag may be in the inserted text `before`. Without a closing tag, the whole answer is thoughts.
    """
    said = text if "</think>" in text or "</think>" not in marked else marked
    head, ended, rest = said.partition("</think>")
    begun = head.lstrip().startswith("<think>")
    if not (begun or ended or before.rstrip().endswith("<think>")):
        return "", text
    return head.lstrip().removeprefix("<think>").strip(), rest.lstrip("\n")
