"""Sends the requests of a workload to a server, as they are due or as others end."""

import asyncio
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from configs.errors import InputError
from inference.benchmark.remote.prompts import RemoteRequest
from inference.benchmark.remote.stream import Stream, refusal
from inference.http_client.connections import Connections, Unanswered

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclasses.dataclass(frozen=True)
class Sent:
    """A workload as it was answered.

    Attributes:
        requests: what was asked.
        streams: the answers, in the same order.
        seconds: from the first request to the last event.
        client_cpu_s: processor time that this process took meanwhile.
    """

    requests: Sequence[RemoteRequest]
    streams: Sequence[Stream]
    seconds: float
    client_cpu_s: float


async def first_model(connections: Connections) -> str:
    """The name of the first model that a server lists.

    Raises:
        InputError: it cannot be asked, or lists none.
    """
    try:
        answer = await connections.get("/v1/models")
    except Unanswered as error:
        raise InputError(str(error)) from None
    if answer.status != 200:
        raise InputError(f"{connections.address.name} lists no models: {refusal(answer)}")
    try:
        found = msgspec.json.decode(answer.body)["data"][0]["id"]
    except (msgspec.MsgspecError, UnicodeDecodeError, LookupError, TypeError):
        found = None
    if not isinstance(found, str):
        raise InputError(f"{connections.address.name} lists no models: name one by --model")
    return found


def body(request: RemoteRequest, model: str, endpoint: str) -> dict[str, object]:
    """What is posted: greedy, of as many tokens as are asked for."""
    fields: dict[str, object] = {"model": model}
    if endpoint == CHAT:
        fields["messages"] = [{"role": "user", "content": request.prompt}]
    else:
        fields["prompt"] = request.prompt
    return fields | {
        "max_tokens": request.num_new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def check(connections: Connections, like: RemoteRequest, model: str, endpoint: str) -> None:
    """Whether the server answers a short request like one that will follow, but with another
    beginning, which it may keep.

    Raises:
        InputError: it does not; says what it says.
    """
    stream = Stream(time.perf_counter())
    prompt = "Hello" if isinstance(like.prompt, str) else like.prompt[-2:]
    short = RemoteRequest(0.0, prompt, 2)
    data = msgspec.json.encode(body(short, model, endpoint))
    await stream.run(connections, connections.posted(endpoint, data))
    if not stream.is_ok:
        raise InputError(f"{connections.address.name}{endpoint} answers: {stream.error}")


async def send(
    connections: Connections,
    requests: Sequence[RemoteRequest],
    model: str,
    endpoint: str,
    concurrency: int | None = None,
    on_progress: Callable[[int], None] = lambda num_done: None,
) -> Sent:
    """Sends every request and waits for all answers.

    Args:
        requests: in the order of arrival.
        endpoint: one of the two.
        concurrency: at most so many at a time; the next one then arrives as another ends. None:
            each when it is due.
        on_progress: called with the number of requests that have ended.
    """
    data = [msgspec.json.encode(body(request, model, endpoint)) for request in requests]
    due = deque(connections.posted(endpoint, content) for content in data)
    streams: list[Stream] = []
    ended = 0
    cpu, start = time.process_time(), time.perf_counter()

    async def next_one(start_s: float) -> None:
        nonlocal ended
        stream = Stream(start_s)
        streams.append(stream)
        await stream.run(connections, due.popleft())
        ended += 1
        on_progress(ended)

    async def one_after_another() -> None:
        while due:
            await next_one(time.perf_counter())

    async with asyncio.TaskGroup() as group:
        if concurrency is not None:
            for _ in range(min(concurrency, len(requests))):
                group.create_task(one_after_another())
        else:
            for request in requests:
                at = start + request.arrival_s
                if (wait := at - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                group.create_task(next_one(at))
    last = max(
        (stream.event_s[-1] for stream in streams if stream.event_s), default=time.perf_counter()
    )
    return Sent(requests, streams, last - start, time.process_time() - cpu)
