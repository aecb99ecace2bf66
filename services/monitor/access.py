"""Controls access to the page, and sets the headers of answers.

On loopback, requests need a loopback `Host`, which rejects names in an attacker's DNS that resolve to
127.0.0.1. On other addresses a key is required, in the URL (`?key=...`) or as `Authorization: Bearer ...`, as
Prometheus sends it. /health and the page's code need no key: they contain no data of a run.
"""

import hmac

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware
from yarl import URL

from services.observability.http import names_loopback

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


def page_url(host: str, port: int, key: str) -> str:
    """Return the URL that opens the page, with the key if one is required.

    A wildcard host becomes loopback; readers on other machines replace it by the machine's name.
    """
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host.strip("[]"), host.strip("[]"))
    shown = f"[{host}]" if ":" in host else host
    return str(URL(f"http://{shown}:{port}/").with_query({"key": key} if key else None))


def guard(key: str) -> Middleware:
    """Return a middleware that rejects readers without the key, and adds `HEADERS` to every answer."""

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
        if names_loopback(request):
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
