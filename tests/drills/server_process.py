"""A server under test, and its clients, each a process of its own."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_START_S = 900.0


class Server:
    """`python -m scripts.serve` and what can be seen of it from outside."""

    def __init__(self, process: subprocess.Popen[str], port: int):
        self.process, self.port = process, port

    @property
    def pid(self) -> int:
        """Of the process that speaks HTTP."""
        return self.process.pid

    @property
    def engine(self) -> int | None:
        """Of the engine's process; None between two."""
        for pid in descendants(self.pid):
            with contextlib.suppress(OSError):
                if b"--engine_socket" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        return None

    def get(self, path: str) -> tuple[int, str]:
        """Status and body."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as found:
                return found.status, found.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def refusal(self, body: dict[str, Any]) -> tuple[int, str | None]:
        """Status of a completion, and when to come again."""
        url, how = (
            f"http://127.0.0.1:{self.port}/v1/completions",
            {"content-type": "application/json"},
        )
        request = urllib.request.Request(url, json.dumps(body).encode(), how)
        try:
            with urllib.request.urlopen(request, timeout=30) as found:
                return found.status, None
        except urllib.error.HTTPError as error:
            return error.code, error.headers["retry-after"]
        except OSError:
            return 0, None

    def metric(self, name: str) -> float:
        """The sum of a metric's values."""
        values = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", self.get("/metrics")[1], re.M)
        return sum(map(float, values))

    def wait_ready(self, seconds: float = _START_S) -> float:
        """Seconds until new requests are served."""
        start = time.monotonic()
        while self.get("/ready")[0] != 200:
            if self.process.poll() is not None or time.monotonic() - start > seconds:
                raise RuntimeError("the server did not get ready")
            time.sleep(0.02)
        return time.monotonic() - start

    def wait_replaced(self, engine: int, seconds: float = _START_S) -> float:
        """Seconds until another engine than this one serves new requests."""
        start = time.monotonic()
        while self.engine in (None, engine):
            if time.monotonic() - start > seconds:
                raise RuntimeError("the engine was not started again")
            time.sleep(0.02)
        self.wait_ready(seconds)
        return time.monotonic() - start

    def wait_idle(self, seconds: float = 120) -> None:
        """Until nothing runs or waits, by two heartbeats."""
        deadline = time.monotonic() + seconds
        num_idle = 0
        while num_idle < 4 and time.monotonic() < deadline:
            busy = self.metric("vllm:num_requests_running") + self.metric(
                "vllm:num_requests_waiting"
            )
            num_idle = 0 if busy else num_idle + 1
            time.sleep(0.3)

    def held(self) -> dict[str, float]:
        """Pages, and descriptors of both processes, once what is being closed is."""
        found = []
        for _ in range(10):
            found.append((num_descriptors(self.pid), num_descriptors(self.engine)))
            time.sleep(0.1)
        http, engine = map(min, zip(*found, strict=True))
        pages = self.metric("vllm:kv_cache_usage_perc")
        return {"pages": pages, "http_fds": http, "engine_fds": engine}


@contextlib.contextmanager
def started(flags: Sequence[str], environment: Mapping[str, str] = {}) -> Iterator[Server]:
    """One that is ready; nothing of it is left in the end. `environment`: more of its variables."""
    command = [sys.executable, "-m", "scripts.serve", "--port=0", *flags]
    process = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | environment, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        line, seen = "", []
        while not (match := re.match(r"http://\S+:(\d+) ", line)):
            line = process.stderr.readline()
            seen.append(line)
            if not line:
                raise RuntimeError("the server did not start: " + "".join(seen[-5:]))
        threading.Thread(target=process.stderr.read, daemon=True).start()
        server = Server(process, int(match[1]))
        server.wait_ready()
        yield server
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


class Servers:
    """The one that runs: drills that leave it as it was share it."""

    def __init__(self, flags: Sequence[str], environment: Mapping[str, str] = {}):
        self._flags, self._environment = list(flags), dict(environment)
        self._with: list[str] = []
        self._server: Server | None = None
        self._stack = contextlib.ExitStack()

    def get(self, flags: Sequence[str] | None) -> Server:
        """One with more flags; None: whichever there is."""
        runs = self._server is not None and self._server.process.poll() is None
        if self._server is not None and runs and (flags is None or list(flags) == self._with):
            return self._server
        self.close()
        self._with = list(flags or ())
        self._server = self._stack.enter_context(
            started([*self._flags, *self._with], self._environment)
        )
        return self._server

    def close(self) -> None:
        """Ends it."""
        self._stack.close()
        self._server = None


class Clients:
    """Requests under way, in a process of their own; requests as `clients` has them."""

    def __init__(self, port: int, requests: Sequence[dict[str, Any]], most_s: float, **how: Any):
        spec = {"port": port, "requests": list(requests), "most_s": most_s, **how}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("clients.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._most_s = most_s
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(spec).encode())
        self._process.stdin.close()
        self._found: list[bytes] = []
        stdout = self._process.stdout
        self._thread = threading.Thread(target=lambda: self._found.append(stdout.read()))
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether all have ended."""
        return not self._thread.is_alive()

    def stop(self) -> None:
        """They leave at once."""
        self._process.kill()
        self._process.wait()
        self._thread.join()

    def wait(self) -> dict[str, Any]:
        """`seconds` they took, and their `answers`, in the order of the requests."""
        self._thread.join(self._most_s + 60)
        self._process.kill()
        self._process.wait()
        found: dict[str, Any] = json.loads(self._found[0])
        if any(one["status"] == 400 for one in found["answers"]):
            raise RuntimeError("requests are refused: the context is too short for --tokens")
        return found


def ask(server: Server, requests: Sequence[dict[str, Any]], most_s: float, **how: Any) -> Any:
    """Sends requests and waits for them."""
    return Clients(server.port, requests, most_s, **how).wait()


def descendants(pid: int) -> list[int]:
    """Processes that it started, and those that these did."""
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *descendants(child)]
    return found


def is_running(pid: int) -> bool:
    """Whether it is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_ended(pids: Sequence[int], most_s: float) -> float | None:
    """Seconds until all of them have ended; None: they have not."""
    start = time.monotonic()
    while any(map(is_running, pids)):
        if time.monotonic() - start > most_s:
            return None
        time.sleep(0.005)
    return time.monotonic() - start


def num_descriptors(pid: int | None) -> int:
    """That are open."""
    return len(os.listdir(f"/proc/{pid}/fd")) if pid else 0


def resident_mb(pid: int | None) -> float:
    """Memory that a process has."""
    if pid is None:
        return 0.0
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def kill(pid: int | None) -> None:
    """As nobody can catch it."""
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
