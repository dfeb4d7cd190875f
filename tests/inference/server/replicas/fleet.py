"""Several replicas in one process, each before an engine whose answers are known, and a gateway
before them: Ray's part is played here.
"""

import asyncio
import contextlib
import threading
from contextlib import aclosing

import httpx2

from inference.server.client.launch import Thread
from inference.server.replicas.forwarded import HttpRequest, ReplicaLost
from inference.server.replicas.gateway import Gateway
from inference.server.replicas.replica import Replica
from inference.server.service import Limits, Service
from inference.server.web import serving
from inference.server.web.app import guarded
from inference.server.web.asgi_client import Parts
from inference.server.web.serving import DrainingServer
from tests.inference.server.running import wait_until

USUAL = Limits()


class Fleet:
    """The first that is there, and may be asked, gets a request.

    Attributes:
        asked: which replica had each request.
        requests: the same requests.
    """

    def __init__(self, engines, limits):
        self.services = [Service(Thread(lambda each=each: each), limits) for each in engines]
        self.replicas = [Replica(one, str(n)) for n, one in enumerate(self.services)]
        self.gone = [asyncio.Event() for _ in engines]
        self.asked: list[int] = []
        self.requests: list[HttpRequest] = []

    async def answer(self, request: HttpRequest) -> Parts:
        there = [n for n, gone in enumerate(self.gone) if not gone.is_set()]
        if not there:
            await asyncio.sleep(60)  # as Ray waits for one
        chosen = [n for n in there if str(n) not in request.avoid] or there
        self.asked.append(chosen[0])
        self.requests.append(request)
        gone = asyncio.ensure_future(self.gone[chosen[0]].wait())
        async with aclosing(self.replicas[chosen[0]].answer(request)) as parts:
            while True:
                part = asyncio.ensure_future(anext(parts, None))
                try:
                    await asyncio.wait([part, gone], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    if not part.done():
                        part.cancel()
                        await asyncio.gather(part, return_exceptions=True)
                if part.cancelled():
                    raise ReplicaLost
                if part.result() is None:
                    return
                yield part.result()

    async def num_ready(self) -> int:
        return sum(not gone.is_set() for gone in self.gone)

    async def metrics(self) -> dict[str, str]:
        return dict(one.metrics() for one in self.replicas)


class Running:
    """It, and a client of it."""

    def __init__(self, url, gateway, loop):
        self.url, self.gateway, self.loop = url, gateway, loop
        self.http = httpx2.Client(base_url=url, timeout=120)

    @property
    def fleet(self) -> Fleet:
        return self.gateway.replicas

    def lose(self, *replicas: int) -> None:
        for n in replicas:
            self.loop.call_soon_threadsafe(self.fleet.gone[n].set)

    def post(self, path="/v1/completions", **asked):
        return self.http.post(path, json={"temperature": 0} | asked)

    def metric(self, name: str) -> float:
        lines = self.http.get("/metrics").text.splitlines()
        (value,) = [line.split()[1] for line in lines if line.startswith(f"{name} ")]
        return float(value)


@contextlib.contextmanager
def running(*engines, limits: Limits = USUAL, keys=None):
    """A gateway in a thread of the test, and a replica for each engine."""
    listening = serving.bound("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    found = {}

    async def serve():
        gateway = Gateway(limits)
        server = DrainingServer(guarded(gateway, limits, keys, True), gateway, limits, drain_s=10)
        found.update({"server": server, "one": Running(url, gateway, asyncio.get_running_loop())})
        found["serving"] = asyncio.create_task(server.serve(sockets=[listening]))
        fleet = Fleet(engines, limits)
        await asyncio.gather(*(one.start() for one in fleet.replicas))
        gateway.replicas = fleet
        await found["serving"]
        await asyncio.gather(*(one.close() for one in fleet.replicas))

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    wait_until(lambda: "one" in found and found["one"].gateway.replicas is not None)
    one = found["one"]
    try:
        yield one
    finally:
        one.http.close()
        for engine in engines:
            engine.gate.set()
            engine.may_go_on.set()
        for _ in range(2):
            one.loop.call_soon_threadsafe(found["server"].handle_exit, 15, None)
        thread.join(60)
        assert not thread.is_alive(), "the gateway did not end"
