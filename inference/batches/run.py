"""Asks the requests of a batch, so many at a time."""

import asyncio
import random
from collections.abc import Callable, Iterable
from typing import Protocol

from configs.errors import shown
from inference.batches import records
from inference.batches.lines import Line
from inference.batches.records import Record
from inference.http_client.connections import Answer, NoConnection, Unanswered

_BUSY = (429, 503)
_PATIENCE_S = 300.0  # with a server that is busy, or cannot be reached for now
_ATTEMPTS = 3  # of a request whose connection ended
_SHOWN = 200  # bytes of a refusal
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 10.0


class Denied(Exception):
    """The server refuses whoever asks; says why."""


class Transport(Protocol):
    """Whoever answers: connections to a server, or an application in this process."""

    async def post(self, path: str, body: bytes) -> Answer:
        """The answer to JSON that is posted; `Unanswered` where there is none."""


async def run(
    server: Transport,
    lines: Iterable[Line],
    concurrency: int,
    on_result: Callable[[Line, Record], None],
    patience_s: float = _PATIENCE_S,
) -> None:
    """Sends every request, again while the server is busy, and reports each result as it comes.

    Args:
        patience_s: for a server that is busy or cannot be reached.

    Raises:
        NoConnection: it cannot be reached any more.
        Denied: it refuses the key, or wants one. In both cases what was not answered has no result.
    """
    waiting = iter(lines)

    async def one_after_another() -> None:
        for line in waiting:
            on_result(line, await _answer(server, line, patience_s))

    workers = [asyncio.create_task(one_after_another()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


def check_allowed(answer: Answer) -> None:
    """Raises Denied if the server refuses the key, or wants one."""
    if answer.status in records.DENIED:
        why = f"status {answer.status}, {shown(answer.body[:_SHOWN].decode(errors='replace'))}"
        raise Denied(f"the server refuses the key, or that there is none: {why}")


async def _answer(server: Transport, line: Line, patience_s: float) -> Record:
    clock = asyncio.get_running_loop().time
    until, pause_s, ended = clock() + patience_s, _FIRST_PAUSE_S, 0
    while True:
        wanted_s = 0.0
        try:
            answer = await server.post(line.url, line.body)
        except NoConnection:
            if clock() >= until:
                raise
        except Unanswered as error:
            ended += 1
            if ended == _ATTEMPTS:
                return records.failed(line, "no_answer", str(error))
        else:
            check_allowed(answer)
            if answer.status not in _BUSY or clock() >= until:
                return records.answered(line, answer)
            wanted_s = _retry_after_s(answer)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        await asyncio.sleep(max(wanted_s, pause_s * random.uniform(0.5, 1.0)))


def _retry_after_s(answer: Answer) -> float:
    try:
        return min(60.0, max(0.0, float(answer.headers.get("retry-after", "0"))))
    except ValueError:  # a date
        return 0.0
