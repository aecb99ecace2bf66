"""Classifies hosts as loopback or reachable, and builds the URLs that a server advertises."""

import ipaddress
import socket
from urllib.parse import urlsplit

WILDCARDS = frozenset({"*", "0.0.0.0", "::"})
"""Hosts that bind all addresses of a machine."""
HOST, PORT = "{host}", "{port}"
"""Placeholders in an advertised URL: this machine's name and the bound port."""


def is_loopback(host: str) -> bool:
    """Return whether `host` is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def bracketed(host: str) -> str:
    """Return a host in URL form: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def reachable_host(host: str) -> str:
    """Return the host to which clients connect: this machine's name if `host` is a wildcard."""
    return socket.gethostname() if host.strip("[]") in WILDCARDS else host


def advertised_url(template: str, *, scheme: str, host: str, port: int) -> str:
    """Return the URL for clients on other machines, without a trailing slash.

    Args:
        template: URL that may contain `HOST` and `PORT`; empty: scheme, host and port as bound.
        scheme, host, port: bound address.
    """
    url = template or f"{scheme}://{bracketed(reachable_host(host))}:{PORT}"
    return url.replace(HOST, socket.gethostname()).replace(PORT, str(port)).rstrip("/")


def advertised_host(template: str) -> str:
    """Return the host of an advertised URL in lower case; `HOST` becomes this machine's name."""
    return urlsplit(template.replace(HOST, socket.gethostname()).replace(PORT, "1")).hostname or ""


def invalid_url_reason(template: str) -> str:
    """Return why clients could not use an advertised URL; empty if the URL is well-formed."""
    if "{" in template.replace(HOST, "").replace(PORT, ""):
        return f"has a placeholder other than {HOST} and {PORT}"
    try:
        parts = urlsplit(template.replace(HOST, "name").replace(PORT, "1"))
        host, port = parts.hostname, parts.port
    except ValueError as error:
        return f"is not a URL: {error}"
    if parts.scheme not in ("http", "https") or not host:
        return "is not a URL of http or https with a host"
    if "@" in parts.netloc or parts.query or parts.fragment:
        return "has a user, a query or a fragment"
    if host in WILDCARDS:
        return "has an address that means all addresses, to which no client can connect"
    if port == 0:
        return f"has port 0; use {PORT} for the bound port"
    return ""
