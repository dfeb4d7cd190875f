"""Connections between the hosts of a mesh, and others: a line of JSON a message, heartbeats, and
what a host says when it joins.
"""

import contextlib
import importlib.metadata
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from configs.errors import InputError

HEARTBEAT_TIMEOUT_S = 8.0
HEARTBEAT_S = 2.0
_LONGEST_HELLO = 400  # bytes
_LONGEST_LINE = 64 << 20  # a prompt of millions of tokens
_SLICE = 1 << 20  # that one call sends: its timeout is for all that it is given
_LOCAL = ("localhost", "127.0.0.1")
_MOST_CLOCK_S = 30.0
_PACKAGES = ("jax", "jaxlib")  # processes with different ones may not even meet


class Link:
    """A connection to another host."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.connection.settimeout(HEARTBEAT_TIMEOUT_S)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.lines = self.connection.makefile("rb")
        self._sending = threading.Lock()
        threading.Thread(target=self._send_heartbeats, daemon=True).start()

    def send(self, message: object, *buffers: memoryview) -> None:
        """Sends a message, and bytes behind it that it announces; a connection that has ended is
        seen where it is read.
        """
        with self._sending:
            try:
                for buffer in (memoryview(_line(message)), *buffers):
                    for start in range(0, len(buffer), _SLICE):
                        self.connection.sendall(buffer[start : start + _SLICE])
            except OSError:  # half a line may have gone: nothing may follow it
                self.end()

    def messages(self) -> Iterator[dict[str, Any]]:
        """What comes, heartbeats excluded, until the other side ends it; whoever reads them reads
        the bytes that one announces from `lines`. Raises OSError (TimeoutError if nothing came for
        `HEARTBEAT_TIMEOUT_S`) or ValueError: it sends something else.
        """
        while line := self.lines.readline(_LONGEST_LINE):
            message = json.loads(line)
            if not isinstance(message, dict):
                raise ValueError("a message is an object")
            if message:
                yield message

    def end(self) -> None:
        """Ends the connection, which is seen where it is read; any thread may."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends it, in the thread that reads it."""
        self.end()
        self.lines.close()
        self.connection.close()

    def _send_heartbeats(self) -> None:
        """Sends one message of no content after another."""
        while self.connection.fileno() >= 0:
            self.send({})
            time.sleep(HEARTBEAT_S)


def difference(
    facts: Mapping[str, str], other: Mapping[str, object], here: str, there: str
) -> str | None:
    """What a process there has otherwise than one here, in one line."""
    for name in [*facts, *other]:
        if facts.get(name) != other.get(name):
            return (
                f"{there} has another {name} than {here}: {str(other.get(name))[:120]}, not "
                f"{str(facts.get(name))[:120]}"
            )
    return None


def is_local(address: str) -> bool:
    """Whether all hosts are on this machine."""
    return address in _LOCAL


def listening(address: str, port: int) -> socket.socket:
    """Where host 0 waits for others; raises InputError if the port is taken. On every address of
    this machine, whose own name may mean loopback here, unless all hosts are on it.
    """
    try:
        if is_local(address):
            return socket.create_server((address, port))
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise InputError(f"host 0 cannot listen at {address}:{port}: {error.strerror}") from None


def connect(address: str, port: int, count: int, index: int, patience_s: float) -> Link:
    """A connection to host 0, which may come later; raises InputError if it does not come within
    `patience_s`, or refuses this host.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            connection = socket.create_connection((address, port), timeout=HEARTBEAT_S)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                why = error.strerror or "no answer"
                raise InputError(
                    f"no sign of host 0 at {address}:{port} within {patience_s:.0f} s: {why}"
                ) from None
            time.sleep(0.2)
    try:
        connection.sendall(_line(greeting(count, index)))
        link = Link(connection)
        problem = json.loads(link.lines.readline() or b'{"problem": "host 0 ended"}')["problem"]
    except (OSError, ValueError, KeyError):
        problem = f"what answers at {address}:{port} is no host 0"
    if problem:
        raise InputError(problem)
    return link


def greeting(count: int, index: int) -> dict[str, Any]:
    """What a host says first."""
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {"count": count, "index": index, "versions": versions, "clock": time.time()}


def received_greeting(connection: socket.socket) -> dict[str, Any] | None:
    """The greeting of another host; None of whoever is none."""
    connection.settimeout(HEARTBEAT_S)
    line = b""
    try:
        while not line.endswith(b"\n") and len(line) < _LONGEST_HELLO:
            line += connection.recv(1) or b"\n"
        hello = json.loads(line)
    except (OSError, ValueError):
        return None
    types = {"count": int, "index": int, "versions": dict, "clock": float}
    is_host = isinstance(hello, dict) and all(
        isinstance(hello.get(name), type_) for name, type_ in types.items()
    )
    return hello if is_host else None


def problem_of(hello: dict[str, Any], count: int) -> str | None:
    """Why a host cannot join host 0, in one line; None if it can."""
    name, local = f"host {hello['index']}", greeting(count, 0)
    if hello["count"] != count:
        return f"{name} expects {hello['count']} hosts, not {count}: give all the same --hosts"
    if not 0 < hello["index"] < count:
        return f"{name} is none of {count}: --host_index is 1 to {count - 1} there"
    for package, version in local["versions"].items():
        other = str(hello["versions"].get(package))[:20]
        if other != version:
            return f"{name} has {package} {other}, host 0 has {version}: install the same on both"
    ahead_s = hello["clock"] - local["clock"]
    if abs(ahead_s) > _MOST_CLOCK_S:
        side = "ahead of" if ahead_s > 0 else "behind"
        return (
            f"the clock of {name} is {abs(ahead_s):.0f} s {side} host 0's: set both by a time "
            f"server, to at most {_MOST_CLOCK_S:.0f} s apart"
        )
    return None


def answer(connection: socket.socket, problem: str | None) -> None:
    """Tells a host whether it may join."""
    with contextlib.suppress(OSError):
        connection.sendall(_line({"problem": problem}))


def _line(message: object) -> bytes:
    return json.dumps(message).encode() + b"\n"
