"""The client of a request, and its time limit."""

import asyncio
import dataclasses
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from inference.server.protocol.errors import ApiError, invalid

TIMEOUT = "x-request-timeout"
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


class Deadline:
    """The time by which an HTTP request has to be answered.

    Attributes:
        at: the deadline, by the event loop's clock.
        started: when the request came, by the same clock.
    """

    def __init__(self, limit_s: float):
        """`limit_s`: seconds from now."""
        self._limit_s = limit_s
        self.started = asyncio.get_running_loop().time()
        self.at = self.started + limit_s

    @property
    def spent_s(self) -> float:
        return asyncio.get_running_loop().time() - self.started

    @property
    def left_s(self) -> float:
        return self.at - asyncio.get_running_loop().time()

    def passed(self) -> ApiError:
        """The error of an answer that missed the deadline."""
        why = f"the answer was not finished within {self._limit_s:g} s"
        return ApiError(408, why, code="timeout", may_retry=False)

    @asynccontextmanager
    async def enforce(self) -> AsyncIterator[None]:
        """Ends the block at the deadline with an `ApiError` (408)."""
        try:
            async with asyncio.timeout_at(self.at):
                yield
        except TimeoutError:
            raise self.passed() from None


@dataclasses.dataclass(frozen=True)
class Caller:
    """The client of one request.

    Attributes:
        name: of the client's key; "" without keys.
        deadline: of the end of the answer.
        relaxed: keywords of schemas that the answer may not obey; a header names them.
        is_background: the request belongs to a batch, so others go before it.
    """

    name: str
    deadline: Deadline
    relaxed: set[str] = dataclasses.field(default_factory=set)
    is_background: bool = False

    @classmethod
    def of(cls, name: str, timeout: str | None, max_s: float) -> "Caller":
        """Reads a client's time limit, at most `max_s`; `timeout`: header `x-request-timeout`.

        Raises:
            ApiError: 400, the header is no number of seconds.
        """
        if timeout is None:
            return cls(name, Deadline(max_s))
        if not _SECONDS.fullmatch(timeout) or not float(timeout):
            raise invalid(TIMEOUT, "is a number of seconds above 0")
        return cls(name, Deadline(min(max_s, float(timeout))))
