"""Clients of a server under test, in a process of their own: a list of requests as JSON on stdin,
what became of each on stdout. They end by themselves, after `most_s` at the latest.
"""

import asyncio
import contextlib
import json
import random
import socket
import sys
import time
from collections.abc import AsyncIterator
from typing import Any


class Asked:
    """One request, and what came of it.

    Its fields: `body`, of a completion that streams; `at`: seconds after the start; `leave`: None,
    ["after_s", n] or ["after_tokens", n]; `reads`: false for one that never does, of which
    `sends_head` tells whether the request is whole.
    """

    def __init__(self, given: dict[str, Any]):
        self.given = given
        self.status = 0
        self.at_s = 0.0
        self.error = ""
        self.took_s = self.first_s = 0.0
        self.times: list[float] = []
        self.texts: dict[int, str] = {}
        self.reasons: list[str] = []
        self.retry_after: str | None = None

    def told(self) -> dict[str, Any]:
        """For the other process; `at_s`: seconds from the start of all to that of this one."""
        gaps = [b - a for a, b in zip(self.times, self.times[1:], strict=False)]
        return {
            "status": self.status, "error": self.error, "at_s": self.at_s, "took_s": self.took_s,
            "first_s": self.first_s, "gaps": gaps, "num_tokens": len(self.times),
            "text": [self.texts[index] for index in sorted(self.texts)], "reasons": self.reasons,
            "retry_after": self.retry_after,
        }  # fmt: skip


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while line := await reader.readline():
        yield line.strip()


async def _answer(asked: Asked, reader: asyncio.StreamReader, start: float) -> None:
    """Reads one, until its end or until the client has had enough."""
    kind, most = asked.given.get("leave") or (None, 0)
    head = await reader.readuntil(b"\r\n\r\n")
    asked.status = int(head.split()[1])
    for field in head.decode().lower().splitlines():
        if field.startswith("retry-after:"):
            asked.retry_after = field.partition(":")[2].strip()
    if asked.status != 200:
        return
    async for line in _lines(reader):
        if not line.startswith(b"data: {"):
            if line == b"data: [DONE]":
                return
            continue
        event = json.loads(line[6:])
        if "error" in event:
            asked.error = event["error"]["message"]
        for choice in event.get("choices", ()):
            asked.times.append(time.perf_counter() - start)
            asked.first_s = asked.times[0]
            index = choice["index"]
            asked.texts[index] = asked.texts.get(index, "") + choice["text"]
            if choice["finish_reason"]:
                asked.reasons.append(choice["finish_reason"])
        if kind == "after_tokens" and len(asked.times) >= most:
            return
    asked.error = asked.error or "the connection ended"


async def _ask(asked: Asked, port: int, headers: str) -> None:
    given, start = asked.given, time.perf_counter()
    own = socket.socket()
    own.setblocking(False)
    if not given.get("reads", True):
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    writer = None
    try:
        await asyncio.get_running_loop().sock_connect(own, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=own, limit=1 << 20)
        body = json.dumps({"stream": True, **given["body"]}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"{headers}Connection: close\r\nContent-Length: {len(body)}\r\n"
        ).encode()
        if not given.get("sends_head", True):
            writer.write(head[:60])
            await reader.read()
            return
        writer.write(head + b"\r\n" + body)
        if not given.get("reads", True):
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            while not writer.transport.is_closing():
                await asyncio.sleep(0.1)
            return
        kind, most = given.get("leave") or (None, 0)
        async with asyncio.timeout(most if kind == "after_s" else None):
            await _answer(asked, reader, start)
    except TimeoutError:
        pass
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        asked.error = type(error).__name__
    finally:
        asked.took_s = time.perf_counter() - start
        if writer is not None:
            writer.transport.abort()
        own.close()


async def _all(spec: dict[str, Any]) -> list[Asked]:
    """Open loop: each at its time; or `workers`, each of which sends one after the other until
    `seconds` have passed, from the list again and again; who is refused comes again when told.
    """
    asked = [Asked(each) for each in spec["requests"]]
    start, port, headers = time.perf_counter(), spec["port"], spec.get("headers", "")

    async def ask(one: Asked) -> None:
        one.at_s = time.perf_counter() - start
        await _ask(one, port, headers)

    async def at_its_time(one: Asked) -> None:
        await asyncio.sleep(one.given.get("at", 0) - (time.perf_counter() - start))
        await ask(one)

    async def repeatedly(num: int, done: list[Asked]) -> None:
        dice = random.Random(num)
        while time.perf_counter() - start < spec["seconds"]:
            one = Asked(dice.choice(spec["requests"]))
            done.append(one)
            await ask(one)
            await asyncio.sleep(float(one.retry_after or 0))

    async def one_after_the_other(rest: list[Asked]) -> None:
        while rest:
            await ask(rest.pop())

    done: list[Asked] = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(spec["most_s"]):
            if "seconds" in spec:
                await asyncio.gather(*(repeatedly(n, done) for n in range(spec["workers"])))
                return done
            if "workers" in spec:
                rest = asked[::-1]
                await asyncio.gather(*(one_after_the_other(rest) for _ in range(spec["workers"])))
            else:
                await asyncio.gather(*map(at_its_time, asked))
    return done or asked


def main() -> None:
    """Asks, and tells."""
    spec = json.load(sys.stdin)
    start = time.perf_counter()
    found = asyncio.run(_all(spec))
    told = {"seconds": time.perf_counter() - start, "answers": [one.told() for one in found]}
    json.dump(told, sys.stdout)


if __name__ == "__main__":
    main()
