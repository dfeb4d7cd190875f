"""The body of a request, with limits on its size and time."""

import asyncio

from starlette.requests import Request

from inference.server.protocol.errors import ApiError


async def read(request: Request, max_bytes: int, max_s: float) -> bytes:
    """Reads the whole body.

    Raises:
        ApiError: the body is not JSON by its headers, too large, or too slow.
        ClientDisconnect: the client left.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "the header Content-Type is application/json here")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "a body is sent as it is here, without Content-Encoding")
    too_large = ApiError(413, f"the body is larger than {max_bytes} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(max_s):
            async for part in request.stream():
                size += len(part)
                if size > max_bytes:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {max_s:g} s") from None
    return b"".join(parts)
