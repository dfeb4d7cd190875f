"""The HTTP application: routes, and errors as JSON."""

from collections.abc import Awaitable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from inference.server.endpoints.anthropic.errors import response as error_response
from inference.server.failures import as_api_error
from inference.server.protocol import caller, parse
from inference.server.protocol.caller import Caller, Deadline
from inference.server.protocol.dialects.translate import renamed
from inference.server.protocol.errors import ApiError
from inference.server.protocol.event_stream import unless_gone
from inference.server.service import Limits, Service
from inference.server.web import body, page_files
from inference.server.web.access import BACKGROUND_S, CLIENT, NO_PROXY, Access, Keys, Site
from inference.server.web.operations import CONTROL, Operation, operations_of

_MAX_NAMED = 16  # ignored fields that an answer names


def application(
    service: Service,
    keys: Keys | None = None,
    is_local: bool = True,
    site: Site = NO_PROXY,
    control_keys: Keys | None = None,
) -> ASGIApp:
    """The application with access control; `keys`, `is_local` and `site` as `Access` has them.
    `control_keys`: of clients that may control the engine; None: none may.
    """
    service.has_control = control_keys is not None
    return guarded(routed(service), service.limits, keys, is_local, site, control_keys)


def guarded(
    app: ASGIApp,
    limits: Limits,
    keys: Keys | None,
    is_local: bool,
    site: Site = NO_PROXY,
    control_keys: Keys | None = None,
) -> ASGIApp:
    """Adds access control; the pages need no key, and what controls the engine one of its own."""
    paths = [file.path for file in page_files.routes()]
    control = {} if control_keys is None else {op.path: control_keys for op in CONTROL}
    return Access(app, keys, is_local, limits.connections, paths, site, control)


def routed(service: Service) -> ASGIApp:
    """The application without access control; its caller sets `CLIENT` in the scope."""

    def route(operation: Operation) -> Route:
        async def answer(request: Request) -> Response:
            return await _answered(_worked(service, request, operation), operation.path)

        return Route(operation.path, answer, methods=[operation.method])

    routes = [route(operation) for operation in operations_of(service)]
    routes += page_files.routes()
    app = Starlette(routes=routes, exception_handlers={HTTPException: _no_such_path})
    app.router.redirect_slashes = False
    return app


async def _worked(service: Service, request: Request, operation: Operation) -> Response:
    """Calls the handler of an operation with what it takes."""
    try:
        if operation.body is not None:
            return await _posted(service, request, operation)
        if operation.form is not None:
            return await operation.work(service, request, request.scope[CLIENT])
    except ClientDisconnect:
        return Response(status_code=499)  # never sent
    if operation.query is None:
        return await operation.work(service, **request.path_params)
    query = parse.query(request.query_params, operation.query)
    return await operation.work(service, request.scope[CLIENT], query, **request.path_params)


async def _posted(service: Service, request: Request, operation: Operation) -> Response:
    """Reads a body and answers it, unless the client disconnects first."""
    limits, scope = service.limits, request.scope
    data = await body.read(request, limits.body_bytes, limits.body_s)
    assert operation.body is not None
    client = Caller.of(scope[CLIENT], request.headers.get(caller.TIMEOUT), limits.request_s)
    if (background_s := scope.get(BACKGROUND_S)) is not None:
        client = Caller(scope[CLIENT], Deadline(background_s), is_background=True)
    parsed = parse.parse(data, operation.body)
    work = operation.work(service, parsed.request, client)
    working = await unless_gone(request.receive, work)
    if working is None:
        service.metrics.disconnected()
        return Response(status_code=499)
    try:
        response = working.result()
    except ApiError as error:
        raise renamed(error, parsed.names) from None
    if client.relaxed:
        response.headers["x-relaxed-schema"] = ", ".join(sorted(client.relaxed))
    if parsed.ignored:
        names = [parse.as_header(name) for name in parsed.ignored[:_MAX_NAMED]]
        response.headers["x-ignored-params"] = ", ".join(names)
        service.metrics.ignored(by=len(parsed.ignored))
    return response


async def _answered(work: Awaitable[Response], path: str) -> Response:
    """Turns exceptions into answers: one that leaves a route closes the client's connection."""
    try:
        return await work
    except Exception as error:
        return error_response(as_api_error(error), path)


async def _no_such_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = "method" if error.status_code == 405 else "path"
    failure = ApiError(error.status_code, f"this server has no such {what}")
    response = error_response(failure, request.scope["path"])
    response.headers.update(error.headers or {})
    return response
