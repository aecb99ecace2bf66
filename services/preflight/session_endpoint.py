"""Finds addresses of the harness endpoint that are unreachable or unsafe."""

from collections.abc import Iterator
from urllib.parse import urlsplit

from protocol.choices import is_own
from protocol.network.addresses import HOST, PORT, advertised_host, invalid_url_reason, is_loopback
from rollout.config import EnvironmentConfig
from rollout.environments.registry import ENVIRONMENTS
from services.preflight.problem import Problem
from services.settings.sections import Settings

ADVERTISE = "environment.advertise"
SESSION_SETTINGS = ("host", "port", "ports", "cert_file", "key_file", "plain_http", "advertise", "sampling")
"""Settings of `[environment]` that only environments with sessions use."""


def session_endpoint_problems(settings: Settings) -> Iterator[Problem]:
    """Yield conflicts between settings of the endpoint and the environment."""
    config = settings.environment
    if config.name not in ENVIRONMENTS.having("has_sessions"):
        yield from () if is_own(config.name) else _unused(config)
        return
    yield from listening_problems(config)
    if config.advertise:
        yield from _advertise_problems(settings)
    elif is_loopback(config.host) and (elsewhere := _server_elsewhere(config)):
        yield Problem(
            f"the server at {elsewhere} would get the endpoint's address on loopback, which is another "
            "machine there",
            "set environment.host and environment.advertise; if it is this machine, set "
            'environment.advertise to "http://127.0.0.1:{port}"',
            "environment.options",
            config.options,
        )


def listening_problems(config: EnvironmentConfig) -> Iterator[Problem]:
    """Yield settings of an address that exposes plain text, or whose TLS is half configured."""
    if bool(config.cert_file) != bool(config.key_file):
        given, missing = ("cert_file", "key_file") if config.cert_file else ("key_file", "cert_file")
        yield Problem(
            f"it is used with environment.{missing}, which is empty",
            "give both, or neither",
            f"environment.{given}",
            getattr(config, given),
        )
    if not is_loopback(config.host) and not config.cert_file and not config.plain_http:
        yield Problem(
            "others can reach it, and prompts, answers and keys of sessions would travel in plain text",
            "make a certificate with `tether keys DIR --endpoint NAME` and set environment.cert_file and "
            "key_file; or set environment.plain_http, if a tunnel or a service mesh encrypts",
            "environment.host",
            config.host,
        )


def _unused(config: EnvironmentConfig) -> Iterator[Problem]:
    default = EnvironmentConfig()
    for name in SESSION_SETTINGS:
        if getattr(config, name) != getattr(default, name):
            yield Problem(
                f"no harness of environment {config.name!r} talks to a URL, so it has no effect",
                f"remove the setting, or use {', '.join(ENVIRONMENTS.having('has_sessions'))}",
                f"environment.{name}",
                getattr(config, name),
            )


def _server_elsewhere(config: EnvironmentConfig) -> str:
    """Return the host of the server that runs the episodes; empty for this machine or without a server."""
    address = config.options.get("url" if config.name == "server" else "address")
    host = urlsplit(address).hostname if isinstance(address, str) else None
    return "" if host is None or is_loopback(host) else host


def _advertise_problems(settings: Settings) -> Iterator[Problem]:
    config, template = settings.environment, settings.environment.advertise
    if fault := invalid_url_reason(template):
        yield Problem(f"it {fault}", "write it as https://rollout.example:{port}", ADVERTISE, template)
        return
    is_plain = urlsplit(template).scheme == "http"
    if is_plain and config.cert_file:
        yield Problem(
            "the endpoint speaks TLS (environment.cert_file), and clients would speak plain HTTP to it",
            "write it with https",
            ADVERTISE,
            template,
        )
    elif is_plain and not is_loopback(advertised_host(template)) and not config.plain_http:
        yield Problem(
            "prompts, answers and keys of sessions would travel to another machine in plain text",
            "write it with https; or set environment.plain_http, if a tunnel or a service mesh encrypts",
            ADVERTISE,
            template,
        )
    workers = sum(entry.count for entry in settings.services.pool) or settings.services.rollouts
    workers += bool(settings.eval.every)
    if workers > 1 and PORT not in template and HOST not in template:
        yield Problem(
            f"the endpoints of {workers} workers, that of [eval] included, would have one address, and each "
            "knows its own sessions alone",
            f"name the worker in it by {PORT}, or by {HOST} where each has a host of its own",
            ADVERTISE,
            template,
        )
