"""The pages for browsers, and their files."""

from pathlib import Path

from starlette.routing import Route

from inference.planner.page import render
from inference.server.web import static

_HERE = Path(__file__).parent
_DOCS = {"/docs": "docs.html", "/docs/docs.css": "docs.css", "/docs/docs.js": "docs.js"}
_CONSOLE = {"/": "index.html"} | {
    f"/console/{name}": name
    for name in (
        *("console.css", "mark.svg", "main.js", "settings.js", "client.js", "conversation.js"),
        *("answer.js", "text.js", "tokens.js", "tip.js", "live.js", "charts.js", "plan.js"),
    )
}
_PLAN = {f"/plan/{name}": name for name in (*render.STYLES, *render.SCRIPTS)}


def routes() -> list[Route]:
    """Routes of all pages. They contain no secrets: their scripts fetch the data with a key."""
    plan = render.shell("plan", "console/mark.svg", "console/plan.js")
    return [
        *static.routes(_HERE / "pages", _DOCS),
        *static.routes(_HERE / "console", _CONSOLE),
        *static.routes(render.ASSETS, _PLAN),
        static.route("/plan", plan.encode(), ".html"),
    ]
