"""A server that runs in a thread of the test, on a free port of this machine."""

import asyncio
import contextlib
import tempfile
import threading
import time
from pathlib import Path

import httpx2

from inference.server.batches import stored_files
from inference.server.batches.batch_service import BatchService
from inference.server.batches.store import Store
from inference.server.batches.stored_files import StorageLimits
from inference.server.client.launch import Launcher, Thread
from inference.server.service import Limits, Service
from inference.server.web import serving
from inference.server.web.access import Keys
from tests.inference.server.fake_engine import FakeEngine

USUAL = Limits()


class Running:
    """It, and a client of it."""

    def __init__(self, service: Service, url: str, server, thread: threading.Thread, said):
        self.service, self.url, self.server, self._thread = service, url, server, thread
        self.said = said  # lines about what was served
        self.error: BaseException | None = None
        unlimited = httpx2.Limits(max_connections=None)
        self.http = httpx2.Client(base_url=url, timeout=120, limits=unlimited)

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def post(self, path: str, **body):
        """Greedy, unless something else is asked for."""
        greedy = {"temperature": 0} if path.endswith("completions") else {}
        return self.http.post(path, json=greedy | body)

    def upload(self, text: str) -> str:
        """The id of a file of requests."""
        form = {"files": {"file": ("x", text)}, "data": {"purpose": "batch"}}
        return self.http.post("/v1/files", **form).json()["id"]

    def wait_ready(self, seconds: float = 60) -> None:
        wait_until(lambda: self.http.get("/ready").status_code == 200, seconds)

    def stop(self) -> None:
        self.server.handle_exit(15, None)

    def join(self, seconds: float = 60) -> None:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the server did not end"


def wait_until(holds, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


@contextlib.contextmanager
def running(
    engine: FakeEngine | Launcher | None = None,
    limits: Limits = USUAL,
    keys: Keys | None = None,
    served_model_name: str | None = None,
    waits: bool = True,
    tool_call_parser: str = "auto",
    traces=None,
    storage: StorageLimits = stored_files.USUAL,
    control_keys: Keys | None = None,
):
    """`engine`: a fake one, or what launches another."""
    launcher = engine
    if engine is None or isinstance(engine, FakeEngine):
        launcher = Thread(lambda: engine or FakeEngine())
    listening = serving.bound("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    batch_dir = tempfile.TemporaryDirectory()
    store = Store("batch_dir", Path(batch_dir.name), storage)
    batches = BatchService(store)
    service = Service(launcher, limits, served_model_name, tool_call_parser, batches=batches)
    has_started, found, said = threading.Event(), {}, []

    def started(server):
        found["server"] = server
        has_started.set()

    def run():
        try:
            serve = serving.serve(
                service, listening, keys, 10, said.append, started, traces,
                control_keys=control_keys,
            )  # fmt: skip
            asyncio.run(serve)
        except BaseException as error:
            found["error"] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert has_started.wait(60)
    one = Running(service, url, found["server"], thread, said)
    try:
        if waits:
            one.wait_ready()
        yield one
    finally:
        one.http.close()
        if isinstance(engine, FakeEngine):
            engine.gate.set()
        one.stop()
        one.stop()
        thread.join(60)
        one.error = found.get("error")
        store.close()
        batch_dir.cleanup()
