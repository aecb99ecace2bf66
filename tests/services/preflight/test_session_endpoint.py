"""Tests which addresses of the endpoint are refused before a start, with the reason and the remedy."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from protocol.network.certificates import create_certificate
from services.preflight.check import check_run, describe_run
from services.preflight.session_endpoint import session_endpoint_problems
from tests.services.preflight.test_check import demo

SERVER = 'environment.name="server"'
URL = 'environment.options={url="http://127.0.0.1:9/run"}'
PAIR = ('environment.cert_file="c"', 'environment.key_file="k"')
PLAIN = "environment.plain_http=true"


def found(tmp_path: Path, *overrides: str) -> list[str]:
    return [str(problem) for problem in session_endpoint_problems(demo(tmp_path / "run", *overrides))]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (['environment.host="0.0.0.0"'], "tether keys DIR --endpoint NAME"),
        (['environment.host="10.0.0.5"'], "plain text; make a certificate"),
        (['environment.cert_file="c"'], "environment.key_file, which is empty"),
        (['environment.key_file="k"'], "environment.cert_file, which is empty"),
        (['environment.advertise="http://0.0.0.0:{port}"', PLAIN], "all addresses"),
        (['environment.advertise="http://rollout.example:{port}"'], "to another machine in plain text"),
        (['environment.advertise="http://127.0.0.1:{port}"', *PAIR], "write it with https"),
        (['environment.advertise="https://t.example"', "services.rollouts=2"], "endpoints of 2 workers"),
        (['environment.advertise="https://t.example"', "eval.every=2"], "endpoints of 2 workers"),
        (['environment.options={url="http://10.0.0.7:9/run"}'], "the server at 10.0.0.7 would get"),
        (['environment.name="verifiers"', 'environment.options={address="tcp://e:5"}'], "server at e would"),
    ],
)
def test_an_address_that_is_not_safe_or_cannot_be_used_is_refused(
    tmp_path: Path, overrides: Sequence[str], problem: str
) -> None:
    (text,) = found(tmp_path, SERVER, URL, *overrides)
    assert problem in text
    assert text.startswith("setting environment.")


@pytest.mark.parametrize(
    "overrides",
    [
        ['environment.host="0.0.0.0"', *PAIR],
        ['environment.host="0.0.0.0"', PLAIN],
        ['environment.advertise="https://tunnel.example"'],
        [
            'environment.advertise="http://127.0.0.1:9000"',
            'environment.options={url="http://10.0.0.7:9/run"}',
        ],
        ['environment.advertise="https://{host}.pods:{port}"', "services.rollouts=2", "eval.every=2"],
    ],
)
def test_an_address_that_is_safe_is_not_refused(tmp_path: Path, overrides: Sequence[str]) -> None:
    assert found(tmp_path, SERVER, URL, *overrides) == []


def test_an_endpoint_without_a_harness_is_refused(tmp_path: Path) -> None:
    (text,) = found(tmp_path, 'environment.advertise="https://t.example"')
    assert "environment 'single_turn' talks to a URL" in text


def test_check_finds_files_that_are_no_certificate_and_ports_that_are_used(tmp_path: Path) -> None:
    cert_file, key_file = create_certificate(tmp_path / "keys", ["a"])
    pair = (f'environment.cert_file="{cert_file}"', f'environment.key_file="{cert_file}"')
    settings = demo(
        tmp_path / "run", SERVER, URL, *pair, 'environment.host="192.0.2.1"', "environment.port=7"
    )
    problems = [str(problem) for problem in check_run(settings, local=True).problems]
    assert any(text.startswith("setting environment.cert_file") for text in problems)
    assert any("port 7 of 192.0.2.1 cannot be served on" in text for text in problems)
    assert key_file.is_file()


@pytest.mark.parametrize(
    ("template", "options", "warns"),
    [
        ("", "", True),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "", True),
        ("{{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}{% endfor %}", "", False),
        ("", ',tool_syntax="none"', False),
    ],
)
def test_check_says_that_the_model_would_not_see_tools(
    tmp_path: Path, template: str, options: str, warns: bool
) -> None:
    (tmp_path / "own.jinja").write_text(template)
    file = f'render.chat_template_file="{tmp_path / "own.jinja"}"'
    given = [file, "render.chat_template=auto"] if template else []
    agent = f'environment.options={{url="http://127.0.0.1:9/run"{options}}}'
    settings = demo(tmp_path / "run", SERVER, agent, *given)
    findings = check_run(settings)
    assert findings.model is not None
    assert findings.source is not None
    lines = describe_run(settings, findings.model, findings.source)
    assert any("WARNING: the chat template does not write tools" in line for line in lines) == warns
