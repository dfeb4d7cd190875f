"""The client of a request, and its time limit."""

import dataclasses
import re

from inference.server.protocol.errors import invalid

TIMEOUT = "x-request-timeout"
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


@dataclasses.dataclass(frozen=True)
class Caller:
    """The client of one request.

    Attributes:
        name: of the client's key; "" without keys.
        limit_s: seconds until the end of the answer.
        relaxed: keywords of schemas that the answer may not obey; a header names them.
    """

    name: str
    limit_s: float
    relaxed: set[str] = dataclasses.field(default_factory=set)

    @classmethod
    def of(cls, name: str, timeout: str | None, max_s: float) -> "Caller":
        """Reads a client's time limit, at most `max_s`; `timeout`: header `x-request-timeout`.

        Raises:
            ApiError: 400, the header is no number of seconds.
        """
        if timeout is None:
            return cls(name, max_s)
        if not _SECONDS.fullmatch(timeout) or not float(timeout):
            raise invalid(TIMEOUT, "is a number of seconds above 0")
        return cls(name, min(max_s, float(timeout)))
