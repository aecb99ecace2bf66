"""Parses queries of the page's requests, and encodes answers."""

from typing import Any

import msgspec
from aiohttp import web

COMPRESS_FROM = 1000
"""Minimum size in bytes of a compressed answer."""


def json_answer(value: Any) -> web.Response:
    """Return an answer with a value as JSON."""
    body = msgspec.json.encode(value)
    answer = web.Response(body=body, content_type="application/json", charset="utf-8")
    if len(body) >= COMPRESS_FROM:
        answer.enable_compression()
    return answer


def number_in(request: web.Request, name: str) -> int:
    """Return a number in the query; 0 if it is missing.

    Raises:
        web.HTTPBadRequest: it is not a number.
    """
    text = request.query.get(name, "0")
    if not text.isdecimal() or len(text) > 16:
        raise web.HTTPBadRequest(text=f"{name} must be a number of at most 16 digits\n")
    return int(text)


def reward_in(request: web.Request, name: str, default: float) -> float:
    """Return a reward in the query; `default` if it is missing.

    Raises:
        web.HTTPBadRequest: it is not a number.
    """
    try:
        return float(request.query.get(name, default))
    except ValueError:
        raise web.HTTPBadRequest(text=f"{name} must be a number\n") from None
