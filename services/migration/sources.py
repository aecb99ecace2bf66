"""Parses the settings of TRL, verl and slime: name -> value.

TRL: a YAML mapping, as for `trl grpo --config`. verl: a YAML tree, or the overrides `a.b.c=value` of its
command. slime: the arguments `--name value` of its train.py, also within the lists of a shell script.
"""

import difflib
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from protocol.errors import SettingsError

OVERRIDE = re.compile(r"\+{0,2}([a-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)
ROOT = "actor_rollout_ref"
"""Section in every file of verl."""
TOKEN = re.compile(
    r"""
    (?P<space> [^\S\n]+ | \\\n | \#.* )
  | (?P<operator> \w+\+?=\( | \d*[<>]+&?\d* | [|&;()\n] )
  | (?P<word> (?: \$\((?:[^()]|\([^()]*\))*\) | "(?:\\[\s\S]|[^"\\])*" | '[^']*' | \\. | [^\s"'\\|&;()<>] )+ )
  | (?P<unclosed> . )
    """,
    re.VERBOSE,
)
"""Pattern of the next token in a shell script; the operator NAME=( begins a list."""
PROGRAM = re.compile(r"(.*/)?train\w*\.py")
EXPANSION = re.compile(r"\$\{\w+\[[@*]\]\}")
"""Pattern of the expansion of a whole list as program arguments."""
SLIME = ("--rollout-batch-size", "--n-samples-per-prompt", "--hf-checkpoint", "--num-rollout")
"""Arguments of slime, of which each slime file contains at least one."""


def detect_source(text: str) -> str:
    """Detect the source of a text: trl, verl or slime."""
    if any(argument in text for argument in SLIME):
        return "slime"
    return "verl" if ROOT in text else "trl"


def read(text: str, source: str) -> dict[str, Any]:
    """Return the settings in a text by name; slime's without leading dashes.

    Raises:
        SettingsError: the text does not have the format of its source.
    """
    if source == "slime":
        return dict(_arguments(_program_arguments(text) or _words(text)))
    if source == "verl":
        return dict(_flat(_yaml(text))) if _is_tree(text) else _overrides(text) or dict(_flat(_yaml(text)))
    return _check_names(_yaml(text))


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ", did you mean X?" for the most similar known name; empty without a similar name."""
    found = difflib.get_close_matches(name, [one for one in known if "*" not in one], n=1)
    return f", did you mean {found[0]}?" if found else ""


def _program_arguments(text: str) -> list[str]:
    """Return the arguments of slime's program in a script, from lists and after its name; empty if none."""
    words, end = list[str](), ""
    for kind, token in _tokens(text):
        if kind == "operator":
            if token.endswith("=("):
                end = ")"
            elif end != ")" or token == ")":
                end = ""
        elif end:
            words.append(token)
        elif PROGRAM.fullmatch(token):
            end = "any operator"
    return words


def _words(text: str) -> list[str]:
    return [token for kind, token in _tokens(text) if kind == "word"]


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    """Yield kind and text of the operators and words of a shell script; words are unquoted."""
    for match in TOKEN.finditer(text):
        kind, token = str(match.lastgroup), match[0]
        if kind == "unclosed":
            line = text.count("\n", 0, match.start()) + 1
            raise SettingsError(f"line {line} opens a {token} without end, so these are not arguments")
        if kind == "word":
            lexer = shlex.shlex(token, posix=True)
            lexer.commenters, lexer.whitespace, lexer.whitespace_split = "", "", True
            token = lexer.get_token() or ""
        if kind != "space" and not EXPANSION.fullmatch(token):
            yield kind, token


def _is_tree(text: str) -> bool:
    """Return whether a text is verl's YAML. Tested first: an apostrophe would open a shell quote."""
    try:
        return ROOT in _yaml(text)
    except SettingsError:
        return False


def _overrides(text: str) -> dict[str, Any]:
    matches = [match for word in _words(text) if (match := OVERRIDE.fullmatch(word))]
    return {match[1]: None if match[2] == "null" else match[2] for match in matches}


def _arguments(words: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each `--name`; several values are a list, no value is True."""
    name, values = "", list[str]()
    for word in [*words, "--"]:
        if not word.startswith("--"):
            values.append(word)
            continue
        if name:
            yield name, True if not values else values[0] if len(values) == 1 else values
        name, separator, value = word[2:].partition("=")
        values = [value] if separator else []


def _yaml(text: str) -> dict[str, Any]:
    import yaml  # type: ignore[import-untyped]

    try:
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that is none
        raise SettingsError(f"not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise SettingsError("no mapping of names to values")
    return tree


def _check_names(tree: Mapping[Any, Any]) -> dict[str, Any]:
    """Check that all names are strings, because YAML reads `1`, `on` and `null` as other types."""
    if wrong := [name for name in tree if not isinstance(name, str)]:
        raise SettingsError(
            f"the name {wrong[0]!r} is not text; write it in quotes, or take it out of the file"
        )
    return dict(tree)


def _flat(tree: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in _check_names(tree).items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{place}{name}.")
        else:
            yield f"{place}{name}", value
