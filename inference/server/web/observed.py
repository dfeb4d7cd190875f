"""Counts every request, and traces those to the model if there are traces."""

from collections.abc import Callable

from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference.server.traces import Traces
from inference.server.web.operations import CONTROL, OPERATIONS

_OTHER = "other"
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class RequestObserver:
    """Middleware that observes paths, methods and status codes."""

    def __init__(
        self, app: ASGIApp, answered: Callable[[str, str, int], None], traces: Traces | None = None
    ):
        """`answered`: called with the path (of this server, or 'other'), the method and the
        status.
        """
        self._app = app
        self._answered = answered
        self._traces = traces
        self._exact = {op.path for op in OPERATIONS + CONTROL if "{" not in op.path}
        templates = (op.path for op in OPERATIONS if "{" in op.path)
        self._templates = {p.replace(":path", ""): compile_path(p)[0] for p in templates}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        handler = self._handler(scope["path"])
        method = scope["method"] if scope["method"] in _METHODS else _OTHER
        status = 0

        async def send_seen(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._answered(handler, method, status)
            await send(message)

        if self._traces is None or not self._traces.has_span(handler):
            await self._app(scope, receive, send_seen)
            return
        with self._traces.span(handler, method, scope["headers"], lambda: status):
            await self._app(scope, receive, send_seen)

    def _handler(self, path: str) -> str:
        """The path under which a request is counted: `other` for paths that clients make up."""
        if path in self._exact:
            return path
        matches = (name for name, regex in self._templates.items() if regex.match(path))
        return next(matches, _OTHER)
