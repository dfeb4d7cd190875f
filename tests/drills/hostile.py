"""Hostile inputs to a server, and to the apps that read files and flags."""

import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor

from tests.drills import harness, hostile_files, hostile_requests
from tests.drills.harness import Drill, Outcome, Setting
from tests.drills.hostile_requests import ENDED, Case
from tests.drills.server_process import Server, ask

_ANSWER_S = 40.0  # a slow body has 30 s
_CONNECTIONS = 4
_LEAK = re.compile(
    rb"0x[0-9a-f]{6,}|/(usr|home|root|tmp|proc|var)/|\w\.py\b|Traceback|\w+Error:", re.IGNORECASE
)


def send(port: int, case: Case) -> tuple[int, bytes, float]:
    """Status (`ENDED`: none, -1: none in time), the whole answer and the seconds it took."""
    start, received, status = time.monotonic(), b"", ENDED
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        connection.settimeout(_ANSWER_S)
        try:
            for part in case.parts:
                connection.sendall(part)
            if case.ends:
                connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the server has answered already
        try:
            while data := connection.recv(1 << 16):
                received += data
                if time.monotonic() - start > _ANSWER_S:
                    raise TimeoutError
        except TimeoutError:
            status = -1
        except OSError:
            pass
    if status == ENDED and (match := re.match(rb"HTTP/1\.\d (\d{3})", received)):
        status = int(match[1])
    return status, received, time.monotonic() - start


def fault(case: Case, status: int, answer: bytes) -> str | None:
    """What is wrong with an answer; None for nothing."""
    body = answer.partition(b"\r\n\r\n")[2]
    if status == -1:
        return "no answer in time"
    if status not in case.expected:
        return f"status {status}: {body[:120].decode(errors='replace')!r}"
    if status >= 400 and (leak := _LEAK.search(body)):
        return f"the answer holds {leak[0].decode()!r}"
    return None


def of_requests(setting: Setting) -> Outcome:
    """Each hostile request to a server of a tiny model; it has to be there afterwards."""
    cases = hostile_requests.cases()[:: setting.size(1, 7)]
    with harness.tiny_server() as server:
        pid, engine = server.pid, server.engine
        good = {"body": {"prompt": "Hi", "max_tokens": 8, "temperature": 0, "ignore_eos": True}}
        (before,) = ask(server, [good], 120)["answers"]
        faults = {}
        pool = ThreadPoolExecutor(_CONNECTIONS)
        try:
            sent = pool.map(lambda case: send(server.port, case), cases)
            for case, (status, answer, _) in zip(cases, sent, strict=True):
                if reason := fault(case, status, answer):
                    faults[case.name] = reason
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        server.wait_idle()
        (after,) = ask(server, [good], 120)["answers"]
        is_same = _is_alive(server, pid, engine) and before["text"] == after["text"]
    return _outcome(len(cases), faults, is_same, "the server is as before", "the server changed")


def _is_alive(server: Server, pid: int, engine: int | None) -> bool:
    restarts = server.metric("ridgeline:engine_restarts_total")
    return server.process.poll() is None and (server.pid, server.engine) == (pid, engine) and (
        not restarts
    )  # fmt: skip


def of_files(setting: Setting) -> Outcome:
    """Each hostile file, directory and flag to the app that reads it."""
    cases = hostile_files.cases(setting.folder)[:: setting.size(1, 9)]
    faults = hostile_files.run(cases, setting.folder)
    return _outcome(len(cases), faults, True, "each one line", "")


def _outcome(num: int, faults: dict[str, str], holds: bool, good: str, bad: str) -> Outcome:
    shown = "; ".join(f"{name}: {reason}" for name, reason in list(faults.items())[:5])
    text = f"{num - len(faults)} of {num} as expected, {good if holds else bad}"
    return Outcome(holds and not faults, f"{text}{f': {shown}' if faults else ''}", faults)


DRILLS = (
    Drill(
        "hostile_requests",
        ">= 400 hostile requests: a status that fits, no 5xx, no leak, no hang; the server as "
        "before",
        of_requests, limit_s=25,
    ),
    Drill(
        "hostile_files", "hostile checkpoints, tokenizers, .gguf files and flags: one line each",
        of_files, limit_s=50,
    ),
)  # fmt: skip
