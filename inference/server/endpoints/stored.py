"""What the endpoints of files and of batches share."""

from typing import Protocol, TypeVar

from inference.server.batches.batch_service import BatchService
from inference.server.protocol.errors import ApiError, unavailable
from inference.server.service import Service


class Listed(Protocol):
    """A file or a batch; later ones have greater ids."""

    id: str


PATHS = ("/v1/files", "/v1/batches")
Item = TypeVar("Item", bound=Listed)


def batches_of(service: Service) -> BatchService:
    """Raises an `ApiError` (501) if this server stores nothing, 503 if it is shutting down."""
    if service.is_draining:
        raise unavailable("the server is shutting down")
    if service.batches is None:
        why = "this server stores no files and batches: scripts.serve --batch_dir=DIR does"
        raise ApiError(501, why, code="unsupported", may_retry=False)
    return service.batches


def part(
    items: list[Item], after: str | None, limit: int, newest_first: bool
) -> tuple[list[Item], str | None, str | None, bool]:
    """Returns items behind an id, the first and last id of these, and whether others follow.

    Args:
        items: the oldest first.
        after: an id, which may be deleted by now.
    """
    ordered = items[::-1] if newest_first else items
    if after is not None:
        ordered = [
            item for item in ordered if (item.id < after if newest_first else item.id > after)
        ]
    shown = ordered[:limit]
    if not shown:
        return [], None, None, False
    return shown, shown[0].id, shown[-1].id, len(ordered) > limit
