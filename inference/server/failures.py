"""Failures as clients get them; those of the server itself are logged with the request's id."""

import logging
import traceback
from contextvars import ContextVar

from inference.server.protocol.errors import ApiError

request_id: ContextVar[str] = ContextVar("request_id", default="")  # of this context's request

_MAX_CHARS = 500

_log = logging.getLogger(__name__)


def as_api_error(error: Exception) -> ApiError:
    """The error that a client gets for an exception; logs one of status 500."""
    failed = ApiError(500, "the server failed", code="internal_error")
    answer = error if isinstance(error, ApiError) else failed
    log_failure(error, answer)
    return answer


def log_failure(error: BaseException, answer: ApiError) -> None:
    """Logs an answer of status 500 as one line, with a traceback under `--verbosity=1`.

    Args:
        answer: the client's error; other statuses than 500 are not logged.
    """
    if answer.status != 500:
        return
    cause = answer.message
    if not isinstance(error, ApiError):
        frames = traceback.extract_tb(error.__traceback__)
        where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        cause = f"{type(error).__name__}: {error}"[:_MAX_CHARS] + where
    trace = error if _log.isEnabledFor(logging.DEBUG) else None
    line = f"request {request_id.get()}: 500 {answer.code}: {' '.join(cause.split())}"
    _log.error("%s", line, exc_info=trace)
