"""Endpoints that control the engine: pause, sleep and other weights; they have their own key."""

from starlette.responses import Response

from inference.server.client.engine_control import EngineControl
from inference.server.endpoints.envelope import whole
from inference.server.protocol.caller import Caller
from inference.server.protocol.control import (
    ControlQuery,
    EngineStatus,
    LoadAdapterRequest,
    PauseQuery,
    SleepQuery,
    UnloadAdapterRequest,
    UpdateRequest,
    WakeQuery,
)
from inference.server.protocol.errors import ApiError, invalid
from inference.server.service import Service


async def pause(service: Service, client: str, query: PauseQuery) -> Response:
    """Pause the engine: answers stay where they are, or end with finish_reason abort."""
    await _control(service).pause(aborts=query.mode == "abort")
    return _status(service)


async def resume(service: Service, client: str, query: ControlQuery) -> Response:
    """Resume after a pause."""
    await _control(service).resume()
    return _status(service)


async def sleep(service: Service, client: str, query: SleepQuery) -> Response:
    """Free the device's memory. Answers wait."""
    await _control(service).sleep(query.level)
    return _status(service)


async def wake_up(service: Service, client: str, query: WakeQuery) -> Response:
    """Wake the engine up, with its last weights or others."""
    if query.path is not None:
        _check_no_head(service)
    await _control(service).wake(query.path, query.weight_version)
    return _status(service)


async def is_sleeping(service: Service, client: str, query: ControlQuery) -> Response:
    """Retrieve the state of the engine."""
    return _status(service)


async def update_weights(service: Service, request: UpdateRequest, caller: Caller) -> Response:
    """Update the weights between two steps. Answers go on with the new ones."""
    _check_no_head(service)
    keeps_pages = request.flush_cache is False
    await _control(service).update(request.path, request.weight_version, keeps_pages)
    return _status(service)


async def load_lora_adapter(
    service: Service, request: LoadAdapterRequest, caller: Caller
) -> Response:
    """Load an adapter, which requests then choose by its name in place of the model's."""
    control = _control(service)
    if request.lora_name == service.model_name:
        raise invalid("lora_name", "is the name of the model: give another")
    await control.load_adapter(request.lora_name, request.lora_path)
    return _status(service)


async def unload_lora_adapter(
    service: Service, request: UnloadAdapterRequest, caller: Caller
) -> Response:
    """Unload an adapter. Answers that have it go on."""
    await _control(service).load_adapter(request.lora_name, None)
    return _status(service)


def _check_no_head(service: Service) -> None:
    """Raises an `ApiError` (400) for a model whose head this process has, which would stay."""
    if service.facts.classifier is not None:
        why = "the weights of a model that labels or scores texts stay: start another server"
        raise ApiError(400, why, code="unsupported", may_retry=False)


def _control(service: Service) -> EngineControl:
    """Raises an `ApiError` (503) unless there is an engine."""
    service.check_engine()
    return service.client.control


def _status(service: Service) -> Response:
    control = service.client.control
    return whole(EngineStatus(bool(control.level), control.is_paused, control.weight_version))
