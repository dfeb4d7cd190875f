"""/v1/batches: files of requests, answered in slots that no other request needs."""

from starlette.responses import Response

from inference.server.batches.bodies import BatchList, BatchQuery, BatchRequest, NoQuery
from inference.server.endpoints import stored
from inference.server.endpoints.envelope import whole
from inference.server.protocol.caller import Caller
from inference.server.service import Service


async def create(service: Service, request: BatchRequest, caller: Caller) -> Response:
    """Create a batch: answer a file of requests within a day.

    Raises:
        ApiError: a field is wrong, there is no such file, or too many batches are open.
    """
    return whole(await stored.batches_of(service).create(caller.name, request))


async def listed(service: Service, owner: str, query: BatchQuery) -> Response:
    """List batches: of the key of the request, the newest first."""
    bodies = stored.batches_of(service).store.batches.of(owner)
    return whole(BatchList(*stored.part(bodies, query.after, query.limit, newest_first=True)))


async def retrieve(service: Service, owner: str, query: NoQuery, id: str) -> Response:
    """Retrieve a batch: where it stands.

    Raises:
        ApiError: 404, the key has no such batch.
    """
    return whole(stored.batches_of(service).store.batches.get(owner, id).body)


async def cancel(service: Service, owner: str, query: NoQuery, id: str) -> Response:
    """Cancel a batch; its results so far become files.

    Raises:
        ApiError: 404, the key has no such batch; 409, it has ended.
    """
    return whole(await stored.batches_of(service).cancel(owner, id))
