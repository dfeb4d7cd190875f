"""What becomes of streamed requests when one of two replicas is killed, and what two are worth.

Serves the same requests, all at once, with one replica and with two, on the cores of this machine,
and again with two, of which one is killed (SIGKILL) in the middle. A request ends whole, or with an
error event; one that ends otherwise is lost, and so is one that ends with an error though it had no
token at the kill. Needs the extras `serve` and `ray`, of the Python that RAY_PYTHON names.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx2

from tests.drills.harness import TINY_FLAGS, Drill, Outcome, Setting, Skipped

PYTHON = os.environ.get("RAY_PYTHON", sys.executable)
FLAGS = (
    *(*TINY_FLAGS, "--nowarm_up", "--max_num_seqs=24"),
    *("--set=engine.shapes.decode_rows=(24,)", "--set=engine.shapes.prefill_chunks=(1,)"),
)
_START_S, _AGAIN_S, _ANSWER_S = 600.0, 120.0, 600.0


@dataclasses.dataclass
class Kill:
    """A process to end in the middle, and by the monotonic clock, when that was."""

    pid: int
    at: float | None = None


@dataclasses.dataclass
class Stream:
    """What a client was told of one request.

    Attributes:
        error: code of its error event, or of its answer.
        is_done: the last event has come.
        began_late: the first token came after the kill.
    """

    text: str = ""
    num_events: int = 0
    finish_reason: str | None = None
    error: str | None = None
    is_done: bool = False
    began_late: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether it is a whole answer."""
        return self.is_done and self.error is None and self.finish_reason is not None

    @property
    def is_told(self) -> bool:
        """Whether its client knows that it failed, in the middle of it."""
        return self.is_done and self.error == "replica_lost" and self.num_events > 0


class Server:
    """`scripts.serve_ray` as a process."""

    def __init__(self, process: subprocess.Popen[str], url: str):
        self.process, self.url = process, url

    def num_ready(self) -> int:
        """Replicas that serve requests."""
        with contextlib.suppress(httpx2.HTTPError):
            return httpx2.get(f"{self.url}/ready", timeout=10).json().get("replicas", 0)
        return 0

    def wait_ready(self, num: int, seconds: float, without: int | None = None) -> None:
        """Waits for so many, of which none is `without`."""
        deadline = time.monotonic() + seconds
        while self.num_ready() != num or len({*self.replicas()} - {without}) != num:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no {num} replicas in {seconds:.0f} s")
            time.sleep(0.25)

    def num_retried(self) -> int:
        """Requests that were passed on again."""
        for line in httpx2.get(f"{self.url}/metrics", timeout=30).text.splitlines():
            if line.startswith("ridgeline:replica_retries_total "):
                return int(float(line.split()[1]))
        raise RuntimeError("the server does not count what is retried")

    def replicas(self) -> list[int]:
        """Process ids of the replicas."""
        found = []
        for pid in below(self.process.pid):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::ServeReplica"):
                    found.append(pid)
        return found


def below(pid: int) -> Iterator[int]:
    """A process's children, and theirs."""
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                yield child
                yield from below(child)


@contextlib.contextmanager
def serving(num: int, flags: Sequence[str]) -> Iterator[Server]:
    """A server with so many replicas, which are ready."""
    command = [PYTHON, "-m", "scripts.serve_ray", "--port=0", f"--replicas={num}", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            line, before = process.stderr.readline(), ""
            while not line.startswith("http://"):
                if not line:
                    raise RuntimeError(f"{before}the server ended with status {process.wait()}")
                before, line = before + line, process.stderr.readline()
            url = line.split()[0]
            rest = threading.Thread(target=_drop, args=(process.stderr,), daemon=True)
            rest.start()
            server = Server(process, url)
            server.wait_ready(num, _START_S)
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def _drop(lines: Iterator[str]) -> None:
    for line in lines:
        if "error" in line.lower():
            print(line, end="", file=sys.stderr)


async def ask(
    url: str, num: int, max_tokens: int, kill: Kill | None = None
) -> tuple[list[Stream], float]:
    """Asks for so many answers at once, and kills a process when a third of the events have come;
    returns them, and how long they took.
    """
    streams, num_events = [Stream() for _ in range(num)], 0

    def note(stream: Stream) -> None:
        nonlocal num_events
        num_events += 1
        stream.began_late |= kill is not None and kill.at is not None and not stream.num_events
        stream.num_events += 1
        if kill is not None and kill.at is None and num_events >= num * max_tokens / 3:
            kill.at = time.monotonic()
            os.kill(kill.pid, signal.SIGKILL)

    async def one(client: httpx2.AsyncClient, nth: int, stream: Stream) -> None:
        asked = {
            "prompt": f"Story {nth}: once upon a time", "max_tokens": max_tokens, "stream": True,
            "temperature": 0, "ignore_eos": True,
        }  # fmt: skip
        async with client.stream("POST", "/v1/completions", json=asked) as response:
            if response.status_code != 200:
                stream.error = f"status {response.status_code}"
                return
            async for line in response.aiter_lines():
                _read(line, stream, note)

    async def survived(client: httpx2.AsyncClient, nth: int, stream: Stream) -> None:
        try:
            await one(client, nth, stream)
        except httpx2.HTTPError as error:
            stream.error = type(error).__name__

    limits = httpx2.Limits(max_connections=num)
    start = time.monotonic()
    async with httpx2.AsyncClient(base_url=url, timeout=_ANSWER_S, limits=limits) as client:
        await asyncio.gather(*(survived(client, n, s) for n, s in enumerate(streams)))
    return streams, time.monotonic() - start


def _read(line: str, stream: Stream, note: Callable[[Stream], None]) -> None:
    data = line.removeprefix("data: ")
    if not line.startswith("data: "):
        return
    if data == "[DONE]":
        stream.is_done = True
        return
    event = json.loads(data)
    if "error" in event:
        stream.error = event["error"]["code"]
        return
    note(stream)
    for choice in event["choices"]:
        stream.text += choice["text"]
        stream.finish_reason = choice["finish_reason"] or stream.finish_reason


def drill(num: int, max_tokens: int, flags: Sequence[str]) -> dict[str, float]:
    """Does it all; returns the figures."""
    rates, expected = [], []
    for replicas in (1, 2):
        with serving(replicas, flags) as server:
            asyncio.run(ask(server.url, 2 * replicas, 8))  # compiles what is not compiled
            streams, seconds = asyncio.run(ask(server.url, num, max_tokens))
            assert all(stream.is_whole for stream in streams), "without a fault, answers are whole"
            rates.append(num * max_tokens / seconds)
            expected = streams
            if replicas == 2:
                kill = Kill(server.replicas()[0])
                streams, _ = asyncio.run(ask(server.url, num, max_tokens, kill))
                num_retried = server.num_retried()
                server.wait_ready(2, _AGAIN_S, without=kill.pid)
                assert kill.at is not None, "the process was killed while requests were served"
                again_s = time.monotonic() - kill.at
    whole = [n for n, stream in enumerate(streams) if stream.is_whole]
    told = [stream for stream in streams if stream.is_told and not stream.began_late]
    return {
        "requests": num, "whole": len(whole), "told": len(told),
        "lost": num - len(whole) - len(told), "retried": num_retried,
        "same_text": sum(streams[n].text == expected[n].text for n in whole),
        "tok_s_1": rates[0], "tok_s_2": rates[1], "ratio": rates[1] / rates[0], "again_s": again_s,
    }  # fmt: skip


def of_replicas(setting: Setting) -> Outcome:
    """The streams of two replicas of a tiny model, one of which is killed in the middle."""
    if subprocess.run([PYTHON, "-c", "import ray"], capture_output=True).returncode:
        raise Skipped("Ray is not installed (RAY_PYTHON=the Python of an environment with it)")
    num = setting.size(100, 16)
    figures = drill(num, num, FLAGS)
    return Outcome(
        not figures["lost"] and figures["same_text"] == figures["whole"] > 0,
        "{requests} streams: {whole} whole ({retried} of them tried again, {same_text} with the "
        "text of a run without a fault), {told} ended with an error event after their first "
        "token, {lost} lost; 2 replicas again after {again_s:.1f} s".format(**figures),
        figures,
    )


DRILLS = (
    Drill(
        "replicas", "kill -9 of one of two replicas under 100 streams: 0 lost, the same texts",
        of_replicas, limit_s=400,
    ),
)  # fmt: skip
