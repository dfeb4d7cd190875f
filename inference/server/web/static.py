"""Files of this package, for browsers: sent as they are, by name, and nothing beside them."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

# Pages get scripts, styles, pictures and answers from here alone, and nobody else shows them.
_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # kept, and asked for again by its tag
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
    """Routes that answer GET and HEAD; files are read once, here.

    Args:
        folder: where they lie.
        names: of the files in it, by the paths under which they are served.
    """
    return [
        route(path, (folder / name).read_bytes(), Path(name).suffix) for path, name in names.items()
    ]


def route(path: str, content: bytes, suffix: str) -> Route:
    """Likewise, of one file: what it holds, and what its name ends with."""
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = _HEADERS | {"etag": tag}

    async def answer(request: Request) -> Response:
        known = request.headers.get("if-none-match", "")
        if tag in (each.strip().removeprefix("W/") for each in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=_KINDS[suffix])

    return Route(path, answer, methods=["GET"])
