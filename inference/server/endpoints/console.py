"""Data of the page at /: the engine's figures as they change, and a plan."""

import asyncio
import json
from typing import Any

import msgspec
from starlette.responses import Response

from inference.planner.page import render
from inference.server.protocol.errors import ApiError
from inference.server.protocol.event_stream import Events, EventStream
from inference.server.service import Service
from inference.text import layouts

_EVERY_S = 1.0
_ENCODER = msgspec.json.Encoder()


class Figures(msgspec.Struct):
    """The state of the server; most figures are 0 while the model is loaded.

    Attributes:
        at: time of the engine's heartbeat, in seconds by a clock of the server.
        state: of the engine.
        model, max_context, max_seqs, max_top_logprobs: as in `Loaded`.
        has_text, has_chats, has_thoughts: the model has a tokenizer; the tokenizer has a chat
            template; it marks thoughts.
        running, waiting: sequences, as `Heartbeat` counts them.
        cache_used, page_waste, page_sharing, counters: as in `Heartbeat`.
        first_tokens, first_tokens_s: number of answers that have begun, and the sum of their TTFTs.
    """

    at: float
    state: str
    model: str
    max_context: int
    max_seqs: int
    max_top_logprobs: int
    has_text: bool
    has_chats: bool
    has_thoughts: bool
    running: int
    waiting: int
    cache_used: float
    page_waste: float
    page_sharing: float
    counters: dict[str, float]
    first_tokens: float
    first_tokens_s: float


async def figures(service: Service) -> Response:
    """Watch the engine's figures, once a second."""
    return EventStream(_events(service), service.limits.idle_s, lambda error: b"")


async def plan(service: Service) -> Response:
    """Retrieve the data of the planner's page: the model, its machine, and other presets.

    Raises:
        ApiError: 503, the model is being loaded; 404, the model has no plan.
    """
    if service.facts.plan is None:
        raise ApiError(404, "there is no plan of this model")
    return Response(await asyncio.to_thread(_catalog, service), media_type="application/json")


async def _events(service: Service) -> Events:
    """Yields figures until the server drains: it would wait for the end of the stream."""
    while not service.is_draining:
        yield b"data: " + _ENCODER.encode(now(service)) + b"\n\n"
        await asyncio.sleep(_EVERY_S)


def now(service: Service) -> Figures:
    """The figures at this moment."""
    client, facts = service.client, service.client.facts
    heartbeat = client.heartbeat
    text = facts.text if facts is not None else None
    return Figures(
        at=client.heartbeat_at,
        state=client.state.value,
        model=service.model_name,
        max_context=facts.max_context if facts else 0,
        max_seqs=facts.max_seqs if facts else 0,
        max_top_logprobs=facts.max_top_logprobs if facts else 0,
        has_text=text is not None,
        has_chats=text is not None and text.template is not None,
        has_thoughts=text is not None and layouts.of_template(text.template) is not None,
        running=heartbeat.num_running,
        waiting=heartbeat.num_waiting,
        cache_used=heartbeat.cache_used,
        page_waste=heartbeat.page_waste,
        page_sharing=heartbeat.page_sharing,
        counters=heartbeat.counters,
        first_tokens=service.metrics.value("vllm:time_to_first_token_seconds_count"),
        first_tokens_s=service.metrics.value("vllm:time_to_first_token_seconds_sum"),
    )


def _catalog(service: Service) -> bytes:
    """The served model and its machine as JSON, followed by the planner's presets."""
    plan = service.facts.plan
    assert plan is not None
    catalog: dict[str, Any] = render.catalog_of()
    name, machine = service.model_name, "this machine"
    catalog["models"] = {name: plan.model} | {
        other: model for other, model in catalog["models"].items() if other != name
    }
    catalog["start"] = {"model": name} | plan.start
    if plan.machine is not None:
        catalog["hardware"] = {machine: plan.machine} | catalog["hardware"]
        catalog["start"]["hardware"] = machine
    return json.dumps(catalog, separators=(",", ":"), allow_nan=False).encode()
