"""The pages that a browser is sent, and the files that belong to them."""

from pathlib import Path

from starlette.routing import Route

from inference.server.web import static

_HERE = Path(__file__).parent
_DOCS = {"/docs": "docs.html", "/docs/docs.css": "docs.css", "/docs/docs.js": "docs.js"}


def routes() -> list[Route]:
    """Of all pages. They hold nothing that is secret: what they show they ask for, with a key."""
    return static.routes(_HERE, _DOCS)
