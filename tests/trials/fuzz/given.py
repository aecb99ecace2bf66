"""Fuzzes decoders of what users and models provide: settings, prompts, keys, URLs, responses."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zmq.utils import z85

from protocol.errors import RewardError, SettingsError
from protocol.host.curve_keys import load_authorized, load_pair, load_public
from protocol.msgpack_limits import METADATA_DEPTH, check_shape
from reward.group import ResponseGroup
from reward.verifiers.registry import make_verifier
from rollout.prompts.base import PromptConfig
from rollout.prompts.jsonl import make
from rollout.trajectory import pack_metadata
from services.bus.curve import create_keys
from services.ledger.redis.connection import Connection, redacted
from services.settings.load import load_settings
from tests.trials.fuzz.target import Form, Target

ROOT = Path(__file__).parents[3]


def refusal(call: Callable[..., Any], *arguments: Any, **named: Any) -> str | None:
    """Return the text of a SettingsError, None if there is none."""
    try:
        call(*arguments, **named)
    except SettingsError as error:
        return str(error)
    return None


def settings_file(data: bytes, scratch: Path) -> None:
    """A settings file gives settings, or one error that names the setting in one line of bounded length."""
    for name in ("settings.toml", "settings.json"):
        (scratch / name).write_bytes(data)
        refusal(load_settings, str(scratch / name), (), {})


def variables(data: bytes, _: Path) -> None:
    """`NAME=value` lines are read as the environment, and again as --set."""
    lines = data.decode(errors="surrogateescape").replace("\0", "").split("\n")
    environ = {
        name: value
        for name, separator, value in (line.partition("=") for line in lines)
        if separator and name
    }
    for given, overrides in ((environ, ()), ({}, lines)):
        refusal(load_settings, None, overrides, given)


def prompts(data: bytes, scratch: Path) -> None:
    """A file of prompts gives a stream whose prompts can be sent, or an error that names the line."""
    path = scratch / "prompts.jsonl"
    path.write_bytes(data)
    try:
        source = make(PromptConfig(path=str(path), passes=1))
    except SettingsError:
        return
    for index in range(min(source.size or 0, 3)):
        prompt = source.at(index)
        assert prompt.text or prompt.messages
        check_shape(bytes(pack_metadata(prompt)), max_depth=METADATA_DEPTH)


def keys(data: bytes, scratch: Path) -> None:
    """A file of keys is read, or an error names it; among the authorized ones it is skipped."""
    for name in ("server.key", "server.key_secret", "authorized/x.key"):
        path = scratch / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        os.chmod(path, 0o600)
    assert "server.key" in (refusal(load_pair, scratch, "server") or "server.key")
    assert "server.key" in (refusal(load_public, scratch) or "server.key")
    for key in load_authorized(scratch):
        assert len(z85.decode(key)) == 32


def url(data: bytes, _: Path) -> None:
    """The password of a ledger URL is in no message."""
    text = data.decode(errors="replace").replace("hunter2", "x")
    for given in (
        text,
        f"redis://user:hunter2hunter2@{text}",
        f"rediss://:hunter2hunter2@host/{text}",
        f"redis://h/0?password=hunter2hunter2&{text}",
    ):
        assert "hunter2hunter2" not in redacted(given)
        assert "hunter2hunter2" not in (refusal(Connection, given, timeout_s=1, retry_s=0) or "")


VERIFIERS = {
    "exact_match": {},
    "last_integer": {},
    "positions": {},
    "json_schema": {
        "schema": {
            "type": "object",
            "properties": {"a": {"type": "array", "items": {"type": "integer"}}},
            "required": ["a"],
        }
    },
}
SCORES = {name: make_verifier(name, options).score for name, options in VERIFIERS.items()}


def response(data: bytes, _: Path) -> None:
    """Every response of a model has a finite score."""
    text = data.decode(errors="replace")
    for name, score in SCORES.items():
        try:
            (value,) = score(ResponseGroup("", [text], {"answer": "12"}, [1], ["stop"]), [0])
            assert value is not None, name
            assert math.isfinite(value), name
        except RewardError as error:
            raise AssertionError(f"{name}: a response has no score") from error


def _key_seeds() -> list[bytes]:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        create_keys(directory)
        whole = [(Path(directory) / name).read_bytes() for name in ("server.key", "server.key_secret")]
    line = b"metadata\ncurve\n    public-key "
    return [
        *whole,
        line,
        line + b'= "' + b"\xff" * 40 + b'"',
        line + b'= "' + b"#" * 40 + b'"',
        line + b'= "abc"',
    ]


CONFIGS = [(ROOT / "deploy/configs" / name).read_bytes() for name in ("demo.toml", "stragglers.toml")]
DEEP = b'{"prompt": "1+1", "answer": "2", "tests": ' + b"[" * 40 + b"]" * 40 + b"}\n"
URLS = [b"127.0.0.1:6379/0", b"[::1]:1/0?ssl_ca_certs=x", b"[x", b"h:port"]
TARGETS = {
    "settings_file": Target(settings_file, [*CONFIGS, b'{"run": {"steps": 3}}'], Form.JSON),
    "variables": Target(
        variables,
        [
            b'TETHER_STEPS=3\nTETHER_BUS__HOST=::1\nrun.name="x"',
            b'reward.verifiers=[{name="math"}]\nmodel.scratch.layers=1',
        ],
        Form.BYTES,
    ),
    "prompts": Target(
        prompts,
        [
            b'{"prompt": "1+1", "answer": "2"}\n'
            b'{"prompt": [{"role": "user", "content": "x"}], "answer": 3, "tests": ["a"]}\n',
            DEEP,
        ],
        Form.LINES,
    ),
    "keys": Target(keys, _key_seeds(), Form.BYTES),
    "url": Target(url, URLS, Form.BYTES),
    "response": Target(
        response,
        [
            b'```json\n{"a": [1, 2]}\n```',
            b"The answer is -1,234.5 or 12",
            b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}",
            b"9" * 5000,
        ],
        Form.BYTES,
    ),
}
