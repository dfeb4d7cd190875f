"""The pages for browsers, and their files, by a fixed list of names."""

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from inference.planner.page import render

_HERE = Path(__file__).parent
_DOCS = {"/docs": "docs.html", "/docs/docs.css": "docs.css", "/docs/docs.js": "docs.js"}
_CONSOLE = {"/": "index.html"} | {
    f"/console/{name}": name
    for name in (
        *("console.css", "calls.css", "mark.svg", "main.js", "settings.js", "client.js"),
        *("conversation.js", "answer.js", "thought.js", "text.js", "tokens.js", "tip.js"),
        *("tools.js", "calls.js", "call.js", "rows.js", "partial_json.js", "schema.js"),
        *("buttons.js", "live.js", "charts.js", "plan.js"),
    )
}
_PLAN = {f"/plan/{name}": name for name in (*render.STYLES, *render.SCRIPTS)}


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


def routes() -> list[Route]:
    """Routes of all pages, whose files are read once. They contain no secrets: their scripts fetch
    the data with a key.
    """
    folders = ((_HERE / "pages", _DOCS), (_HERE / "console", _CONSOLE), (render.ASSETS, _PLAN))
    plan = render.shell("plan", "console/mark.svg", "console/plan.js")
    return [
        *(
            _route(path, (folder / name).read_bytes(), Path(name).suffix)
            for folder, names in folders
            for path, name in names.items()
        ),
        _route("/plan", plan.encode(), ".html"),
    ]


def _route(path: str, content: bytes, suffix: str) -> Route:
    """A route that answers GET and HEAD with a file; `suffix`: of its name."""
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = _HEADERS | {"etag": tag}

    async def answer(request: Request) -> Response:
        cached_tags = request.headers.get("if-none-match", "")
        if tag in (cached_tag.strip().removeprefix("W/") for cached_tag in cached_tags.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=_KINDS[suffix])

    return Route(path, answer, methods=["GET"])
