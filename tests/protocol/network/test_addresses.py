"""Tests the URLs by which others reach a machine, and those to which no client could connect."""

import socket

import pytest

from protocol.network.addresses import advertised_host, advertised_url, invalid_url_reason


def url_of(template: str, host: str = "0.0.0.0") -> str:
    return advertised_url(template, scheme="https", host=host, port=8443)


def test_an_advertised_url_names_the_machine_and_the_port_that_was_bound() -> None:
    name = socket.gethostname()
    assert url_of("https://{host}.pods:{port}/worker/") == f"https://{name}.pods:8443/worker"
    assert url_of("https://tunnel.example") == "https://tunnel.example"
    assert url_of("") == f"https://{name}:8443"
    assert url_of("", "10.0.0.5") == "https://10.0.0.5:8443"
    assert url_of("", "::1") == "https://[::1]:8443"
    assert advertised_host("http://[::1]:{port}") == "::1"


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("rollout.example:{port}", "not a URL of http"),
        ("ftp://rollout.example", "not a URL of http"),
        ("https://", "not a URL of http"),
        ("https://0.0.0.0:{port}", "all addresses"),
        ("https://[::]:{port}", "all addresses"),
        ("https://rollout.example:0", "port 0"),
        ("https://rollout.example:99999", "not a URL"),
        ("https://user@rollout.example", "a user"),
        ("https://rollout.example?x=1", "a query"),
        ("https://rollout.example:{portt}", "a placeholder other"),
    ],
)
def test_an_address_that_cannot_be_meant_is_refused(template: str, fault: str) -> None:
    assert fault in invalid_url_reason(template)


@pytest.mark.parametrize(
    "template", ["https://{host}:{port}", "http://127.0.0.1:{port}", "https://gateway.example/{host}"]
)
def test_an_address_that_can_be_meant_is_not_refused(template: str) -> None:
    assert invalid_url_reason(template) == ""
