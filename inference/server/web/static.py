"""Serves files of this package to browsers, by a fixed list of names."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

# Pages load scripts, styles, pictures and answers from this server only; no other may embed them.
_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # browsers revalidate it by its tag
}
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}


def routes(folder: Path, names: Mapping[str, str]) -> list[Route]:
    """Routes that answer GET and HEAD; reads the files once.

    Args:
        names: path -> name of the file.
    """
    return [
        route(path, (folder / name).read_bytes(), Path(name).suffix) for path, name in names.items()
    ]


def route(path: str, content: bytes, suffix: str) -> Route:
    """A route to one file; `suffix`: of its name."""
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = _HEADERS | {"etag": tag}

    async def answer(request: Request) -> Response:
        cached_tags = request.headers.get("if-none-match", "")
        if tag in (cached_tag.strip().removeprefix("W/") for cached_tag in cached_tags.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=_KINDS[suffix])

    return Route(path, answer, methods=["GET"])
