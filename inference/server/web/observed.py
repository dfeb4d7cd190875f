"""Every request is counted, whatever answers it, and those to the model have a span where spans are
asked for.
"""

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference.server.traces import Traces
from inference.server.web.operations import OPERATIONS

_OTHER = "other"
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class Observed:
    """Sees what is asked, and the status that is answered."""

    def __init__(
        self, app: ASGIApp, answered: Callable[[str, str, int], None], traces: Traces | None = None
    ):
        """`answered`: called with the path (of this server, or 'other'), the method and the
        status.
        """
        self._app = app
        self._answered = answered
        self._traces = traces
        self._exact = {each.path for each in OPERATIONS if "{" not in each.path}
        named = (each.path.replace(":path", "") for each in OPERATIONS if "{" in each.path)
        self._named = {path.partition("{")[0]: path for path in named}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, as ASGI has it."""
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
        """The path by which a request is counted: what clients make up is none of ours."""
        if path in self._exact:
            return path
        return next((own for start, own in self._named.items() if path.startswith(start)), _OTHER)
