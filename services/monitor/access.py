"""Decides who may read the page, and which headers answers carry.

On loopback every request whose `Host` is loopback, too, is answered; a name that an attacker's DNS points at
127.0.0.1 is not. Elsewhere a key is needed: in the URL (`?key=...`), or as `Authorization: Bearer ...`, as
Prometheus sends it. Only /health and the page's own code, which say nothing of a run, need none.
"""

import hmac
import os
import secrets
from pathlib import Path

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware
from yarl import URL

from protocol.errors import SettingsError
from services.bus.config import is_loopback

KEY_FILE = "monitor.key"
"""Name of the generated key's file in the run directory."""
SHORTEST_KEY = 16
OPEN_PREFIX = "/assets/"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def access_key(host: str, key_file: str, run_dir: Path) -> str:
    """Return the key that readers need; empty on loopback, unless a file is configured.

    Args:
        host: the address that the page is served on.
        key_file: `monitor.key_file`; empty: `KEY_FILE` in the run directory, made if it is not there.
        run_dir: directory of the run.

    Raises:
        SettingsError: the key cannot be read or made, is short, or others can read it.
    """
    if is_loopback(host) and not key_file:
        return ""
    path = Path(key_file) if key_file else run_dir / KEY_FILE
    try:
        if not key_file:
            _make_key(path)
        mode, key = path.stat().st_mode, path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"monitor.host = {host!r} needs a key: {path}: {getattr(error, 'strerror', None) or error}"
        ) from None
    if mode & 0o077:
        raise SettingsError(f"{path}: others can read the key of the monitor's page: chmod 600 {path}")
    if len(key) < SHORTEST_KEY or not key.isascii() or not key.isprintable():
        raise SettingsError(f"{path}: a key has at least {SHORTEST_KEY} printable characters")
    return key


def page_url(host: str, port: int, key: str) -> str:
    """Return the URL that opens the page, with the key if one is needed.

    A host that means all addresses becomes loopback; readers elsewhere put the machine's name in its place.
    """
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host.strip("[]"), host.strip("[]"))
    shown = f"[{host}]" if ":" in host else host
    return str(URL(f"http://{shown}:{port}/").with_query({"key": key} if key else None))


def guard(key: str) -> Middleware:
    """Return a middleware that refuses readers without the key, and adds `HEADERS` to every answer."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        refused = None if _is_open(request) else _refusal(request, key)
        try:
            answer = refused or await handler(request)
        except web.HTTPException as error:
            _harden(error)
            raise
        _harden(answer)
        return answer

    return check


def _harden(answer: web.StreamResponse) -> None:
    answer.headers.update(HEADERS)
    answer.headers.setdefault(hdrs.CACHE_CONTROL, "no-store")


def _is_open(request: web.Request) -> bool:
    return request.path == "/health" or request.path.startswith(OPEN_PREFIX)


def _refusal(request: web.Request, key: str) -> web.Response | None:
    if not key:
        if is_loopback(_host_name(request)):
            return None
        return web.Response(
            status=403,
            text="Open http://127.0.0.1 or http://localhost; under other names only with monitor.key_file.\n",
        )
    scheme, _, token = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    given = token.strip() if scheme.lower() == "bearer" else request.query.get("key", "")
    if hmac.compare_digest(given.encode(errors="replace"), key.encode()):
        return None
    return web.Response(
        status=401,
        headers={hdrs.WWW_AUTHENTICATE: "Bearer"},
        text="A key is needed: open the URL that `tether status` prints, or send it as a bearer token.\n",
    )


def _host_name(request: web.Request) -> str:
    try:
        return URL(f"//{request.headers.get(hdrs.HOST, '')}").host or ""
    except ValueError:
        return ""


def _make_key(path: Path) -> None:
    """Write a random key unless the file exists; readable by its owner only."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with open(descriptor, "w") as file:
        file.write(secrets.token_urlsafe(24) + "\n")
