"""/v1/files: uploads of requests, and the results of batches."""

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from inference.server.batches import upload
from inference.server.batches.bodies import DeletedFile, FileList, FileQuery, NoQuery
from inference.server.endpoints import stored
from inference.server.endpoints.envelope import whole
from inference.server.protocol.errors import ApiError
from inference.server.service import Service


async def create(service: Service, request: Request, owner: str) -> Response:
    """Upload a file of requests for a batch, one a line.

    Raises:
        ApiError: a field is wrong, the file is too large, or there is no room.
    """
    files, limits = stored.batches_of(service).store.files, service.limits
    file = await upload.receive(request, files, owner, limits.body_s, limits.request_s)
    return whole(file.body)


async def listed(service: Service, owner: str, query: FileQuery) -> Response:
    """List files: of the key of the request."""
    bodies = stored.batches_of(service).store.files.of(owner)
    if query.purpose is not None:
        bodies = [body for body in bodies if body.purpose == query.purpose]
    return whole(FileList(*stored.part(bodies, query.after, query.limit, query.order == "desc")))


async def retrieve(service: Service, owner: str, query: NoQuery, id: str) -> Response:
    """Retrieve a file's description.

    Raises:
        ApiError: 404, the key has no such file.
    """
    return whole(stored.batches_of(service).store.files.get(owner, id).body)


async def content(service: Service, owner: str, query: NoQuery, id: str) -> Response:
    """Retrieve a file's content.

    Raises:
        ApiError: 404, the key has no such file.
    """
    files = stored.batches_of(service).store.files
    body = files.get(owner, id).body
    headers = {"x-content-type-options": "nosniff"}  # it is a client's: no page of this server
    kind = "application/octet-stream"
    return FileResponse(files.path(id), 200, headers, kind, filename=body.filename)


async def delete(service: Service, owner: str, query: NoQuery, id: str) -> Response:
    """Delete a file.

    Raises:
        ApiError: 404, the key has no such file; 409, a batch reads it.
    """
    store = stored.batches_of(service).store
    store.files.get(owner, id)
    if (batch_id := store.batches.reader(id)) is not None:
        why = f"{batch_id} reads this file: cancel it, or wait for its end"
        raise ApiError(409, why, code="file_in_use", may_retry=False)
    store.files.delete(id)
    return whole(DeletedFile(id))
