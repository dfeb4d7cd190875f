"""Who sends a request, and how long it waits for the answer."""

import dataclasses
import re

from inference.server.protocol.errors import ApiError

TIMEOUT = "x-request-timeout"
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


@dataclasses.dataclass(frozen=True)
class Caller:
    """Of one request.

    Attributes:
        name: by the key; "" where there are none.
        limit_s: seconds until the end of its answer.
        relaxed: keywords of its schemas that the answer may not obey, which a header names.
    """

    name: str
    limit_s: float
    relaxed: set[str] = dataclasses.field(default_factory=set)

    @classmethod
    def of(cls, name: str, timeout: str | None, most_s: float) -> "Caller":
        """Who sends the header `x-request-timeout`, in seconds, or none; most_s: at most so many.

        Raises:
            ApiError: 400, this is no time.
        """
        if timeout is None:
            return cls(name, most_s)
        if not _SECONDS.fullmatch(timeout) or not float(timeout):
            raise ApiError(
                400,
                f"the header {TIMEOUT} is a number of seconds above 0",
                TIMEOUT,
                "invalid_value",
            )
        return cls(name, min(most_s, float(timeout)))
