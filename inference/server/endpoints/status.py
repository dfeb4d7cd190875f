"""GET endpoints on the state of the server: models, health, metrics."""

from starlette.responses import JSONResponse, Response

from inference.server import metrics
from inference.server import version as program
from inference.server.client.engine_client import State
from inference.server.endpoints.envelope import whole
from inference.server.protocol import parse
from inference.server.protocol.responses import Models, ServedModel
from inference.server.service import Service


async def models(service: Service) -> Response:
    """List models: the served one, and its adapters.

    Raises:
        ApiError: 503, the model is being loaded.
    """
    return whole(Models(_models(service)))


async def model(service: Service, id: str) -> Response:
    """Retrieve a model by its name.

    Raises:
        ApiError: 404, another model is served; 503, the model is being loaded.
    """
    served = {each.id: each for each in _models(service)}
    parse.check_model(id, *served)
    return whole(served[id])


async def health(service: Service) -> Response:
    """Check health: 200 while the engine's loop is alive, or the engine starts."""
    state, is_alive = service.client.state, service.is_alive
    body = {"status": state.value, "heartbeat_age_s": round(service.heartbeat_age_s, 3)}
    return JSONResponse(body, 200 if is_alive else 503)


async def ready(service: Service) -> Response:
    """Check readiness: 200 while new requests are served.

    Raises:
        ApiError: 503, with the reason.
    """
    service.check_ready()
    return JSONResponse({"status": State.READY.value})


async def load(service: Service) -> Response:
    """Retrieve the load: sequences of requests that run or wait, as vLLM's `server_load`."""
    return JSONResponse({"server_load": service.client.num_sequences})


async def version(service: Service) -> Response:
    """Retrieve the version of the server."""
    return JSONResponse({"version": program.version()})


async def show_metrics(service: Service) -> Response:
    """Retrieve metrics, for Prometheus."""
    return Response(service.metrics.text(), media_type=metrics.CONTENT_TYPE)


def _models(service: Service) -> list[ServedModel]:
    name, facts = service.model_name, service.facts
    how = service.started, facts.max_context
    adapters = (ServedModel(adapter, *how, adapter, name) for adapter in service.adapters)
    return [ServedModel(name, *how, root=name), *adapters]
