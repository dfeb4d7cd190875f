"""Several hosts that run one engine over one mesh: host 0 decides, the others do the same, and none
outlives another.

JAX brings the devices together (`jax.distributed`). Beside it every other host has a connection to
host 0, a line of JSON a message. What host 0 does to its engine it tells first, so that the others
do it too; what may differ from host to host (a clock, whether a program is compiled) is host 0's.
Both come in one order, so each host runs the same steps. A host from which nothing comes for
`HEARTBEAT_TIMEOUT_S`, or whose connection ends, is lost, and the process ends with one line.
"""

import contextlib
import json
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, TypeVar

from configs.errors import InputError, shown

T = TypeVar("T")

HEARTBEAT_TIMEOUT_S = 10.0
_HEARTBEAT_S = 2.0
_JOIN_TIMEOUT_S = 60.0
_MOST_HOSTS = 4096


class Hosts:
    """The hosts of a mesh, of which this process is one.

    Attributes:
        index: of this one.
        count: how many there are.
    """

    def __init__(self, index: int = 0, links: Mapping[int, "_Link"] | None = None, count: int = 1):
        """`links` lead from host 0 to all others, and from each of these to host 0."""
        self.index, self.count = index, count
        self._links = dict(links or {})
        self._inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[int, Mapping[str, str]]] = queue.SimpleQueue()
        self._ending = threading.Lock()
        self._has_ended = False
        for peer, link in self._links.items():
            threading.Thread(target=self._listen, args=(peer, link), daemon=True).start()

    def check_alone(self, what: str) -> None:
        """Raises InputError where there are others, who would not follow."""
        if self.count > 1:
            raise InputError(f"{what} goes with one host, here are {self.count}")

    def tell(self, order: str, *arguments: object) -> None:
        """From host 0 to all others: an order with values that JSON has; elsewhere nothing."""
        if self.index == 0:
            self._send({"order": order, "arguments": arguments})

    def orders(self) -> Iterator[tuple[str, list[Any]]]:
        """What host 0 tells, until it ends. Raises RuntimeError if something else comes: the hosts
        are out of step.
        """
        while True:
            message = self._inbox.get()
            if "ended" in message:
                return
            yield self._part(message, "order"), message["arguments"]

    def broadcast(self, value: T) -> T:
        """Host 0's value, on every host."""
        if self.count == 1:
            return value
        if self.index == 0:
            self._send({"value": value})
            return value
        return self._take("value")

    def now(self) -> float:
        """Host 0's `time.perf_counter()`."""
        return self.broadcast(time.perf_counter())

    def compare(self, facts: Mapping[str, str]) -> None:
        """Checks at the start that all hosts mean the same. Raises InputError if they do not; on
        every host, in the same words.
        """
        if self.count == 1:
            return
        if self.index:
            self._send({"facts": dict(facts)})
            problem = self._take("problem")
        else:
            facts_by_peer = dict(self._answers.get() for _ in self._links)
            problems = (
                _difference(facts, facts_by_peer[peer], peer) for peer in sorted(facts_by_peer)
            )
            problem = next(filter(None, problems), None)
            self._send({"problem": problem})
        if problem:
            self._has_ended = True
            raise InputError(problem)

    def end(self, why: str | None = None) -> None:
        """Says that this host ends, and, if it should not, why."""
        with self._ending:
            if self._has_ended:
                return
            self._has_ended = True
        self._send({"ended": why})

    def await_loss(self) -> None:
        """After a failure: waits for the loss of a host that may be its cause, which ends the
        process, as long as that can take to be noticed. Where host 0 has ended meanwhile, as it
        does when nobody waits for steps in flight, so does this process.
        """
        if self.count == 1:
            return
        deadline = time.monotonic() + HEARTBEAT_TIMEOUT_S + _HEARTBEAT_S
        while time.monotonic() < deadline:
            if self.index and self._has_ended:
                sys.exit(0)
            time.sleep(0.05)

    def _take(self, what: str) -> Any:
        """The value that host 0 sends next; where it has ended instead, so does this process."""
        message = self._inbox.get()
        if "ended" in message:
            sys.exit(0)
        return self._part(message, what)

    def _part(self, message: Mapping[str, Any], what: str) -> Any:
        if what not in message:
            raise RuntimeError(
                f"host {self.index} is out of step with host 0: it waits for the next {what}, and "
                f"gets {shown(message)}"
            )
        return message[what]

    def _send(self, message: object) -> None:
        for link in self._links.values():
            link.send(message)

    def _listen(self, peer: int, link: "_Link") -> None:
        why = "its connection ended"
        try:
            for line in link.lines:
                message = json.loads(line)
                if "facts" in message:
                    self._answers.put((peer, message["facts"]))
                elif "ended" in message and (self.index == 0 or message["ended"]):
                    self._lose(peer, message["ended"] or "it ended")
                elif message:
                    self._has_ended |= "ended" in message
                    self._inbox.put(message)
        except TimeoutError:
            why = f"it was silent for {HEARTBEAT_TIMEOUT_S:.0f} s"
        except (OSError, ValueError):
            pass
        self._lose(peer, why)

    def _lose(self, peer: int, why: str) -> None:
        """Ends the process, and tells the others why."""
        with self._ending:
            if self._has_ended:
                return
            self._has_ended = True
            line = why if why.startswith("host ") else f"host {peer} is lost: {why}"
            if self.index == 0:
                for other, link in self._links.items():
                    if other != peer:
                        with contextlib.suppress(OSError):
                            link.send({"ended": line})
            with contextlib.suppress(OSError):
                os.write(2, f"error: {line}\n".encode())
            os._exit(1)


class _Link:
    """A connection to another host."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.connection.settimeout(HEARTBEAT_TIMEOUT_S)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.lines = self.connection.makefile("rb")
        self._sending = threading.Lock()
        threading.Thread(target=self._send_heartbeats, daemon=True).start()

    def send(self, message: object) -> None:
        """Sends a message; a connection that has ended is seen where it is read."""
        with self._sending:
            try:
                self.connection.sendall(_line(message))
            except OSError:  # half a line may have gone: nothing may follow it
                with contextlib.suppress(OSError):
                    self.connection.shutdown(socket.SHUT_RDWR)

    def _send_heartbeats(self) -> None:
        """Sends one message of no content after another."""
        while self.connection.fileno() >= 0:
            self.send({})
            time.sleep(_HEARTBEAT_S)


_current = Hosts()


def current() -> Hosts:
    """The hosts of this process's mesh."""
    return _current


def start(coordinator: str, count: int, index: int) -> None:
    """Finds the other hosts, and has JAX bring their devices together; before JAX looks for any.
    Host 0 takes the port of `coordinator`, its 'address:port', and the next one. Raises InputError
    if `count` and `index` are no such numbers, or the others do not come.
    """
    global _current
    address, port = _checked(coordinator, count, index)
    if count == 1:
        return
    links = (
        _accept(address, port, count) if index == 0 else {0: _connect(address, port, count, index)}
    )
    _current = Hosts(index, links, count)
    import jax

    # Otherwise JAX ends the process where host 0 is gone, with a trace of C++.
    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_enable_preemption_service", False)
    _keep_stdout()
    jax.distributed.initialize(
        f"{address}:{port + 1}", count, index, cluster_detection_method="deactivate"
    )


def _checked(coordinator: str, count: int, index: int) -> tuple[str, int]:
    address, _, port = coordinator.rpartition(":")
    is_port = port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65535
    if not (_is_name(address) and is_port):
        raise InputError(f"a coordinator is host 0's address:port, not {coordinator[:80]!r}")
    if not 1 <= count <= _MOST_HOSTS or not 0 <= index < count:
        raise InputError(f"of {count} hosts the first is 0 and the last {count - 1}, not {index}")
    return address, int(port)


def _is_name(address: str) -> bool:
    """Whether a socket takes it for the name of a host, which need not exist."""
    try:
        return bool(address.encode("idna")) and address.isprintable()
    except UnicodeError:
        return False


def _accept(address: str, port: int, count: int) -> dict[int, _Link]:
    """The connections of all other hosts."""
    links: dict[int, _Link] = {}
    deadline = time.monotonic() + _JOIN_TIMEOUT_S
    try:
        server = socket.create_server((address, port))
    except OSError as error:
        raise InputError(f"host 0 cannot listen at {address}:{port}: {error.strerror}") from None
    with server:
        while len(links) < count - 1:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                missing = ", ".join(str(i) for i in range(1, count) if i not in links)
                _refuse(links, f"host {missing} did not come within {_JOIN_TIMEOUT_S:.0f} s")
            hello = _hello(connection)
            if hello is None:  # somebody else
                connection.close()
                continue
            problem = None
            if hello["count"] != count:
                problem = f"host {hello['index']} expects {hello['count']} hosts, not {count}"
            elif hello["index"] in (0, *links):
                problem = f"host {hello['index']} is there twice"
            with contextlib.suppress(OSError):
                connection.sendall(_line({"problem": problem}))
            if problem:
                _refuse(links, problem)
            links[hello["index"]] = _Link(connection)
    return links


def _refuse(links: Mapping[int, _Link], problem: str) -> NoReturn:
    """Raises InputError, here and on the hosts that have come; 'host ...' begins it."""
    for link in links.values():
        link.send({"ended": problem})
    raise InputError(problem)


def _connect(address: str, port: int, count: int, index: int) -> _Link:
    deadline = time.monotonic() + _JOIN_TIMEOUT_S
    while True:
        try:
            connection = socket.create_connection((address, port), timeout=_HEARTBEAT_S)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                why = error.strerror or "no answer"
                raise InputError(
                    f"no sign of host 0 at {address}:{port} within {_JOIN_TIMEOUT_S:.0f} s: {why}"
                ) from None
            time.sleep(0.2)
    try:
        connection.sendall(_line({"count": count, "index": index}))
        link = _Link(connection)
        problem = json.loads(link.lines.readline() or b'{"problem": "host 0 ended"}')["problem"]
    except (OSError, ValueError, KeyError):
        problem = f"what answers at {address}:{port} is no host 0"
    if problem:
        raise InputError(problem)
    return link


def _hello(connection: socket.socket) -> dict[str, int] | None:
    """Number of hosts and index as another host says them; None of whoever is none."""
    connection.settimeout(_HEARTBEAT_S)
    line = b""
    try:
        while not line.endswith(b"\n") and len(line) < 100:
            line += connection.recv(1) or b"\n"
        hello = json.loads(line)
    except (OSError, ValueError):
        return None
    is_host = isinstance(hello, dict) and all(
        type(hello.get(name)) is int and hello[name] >= 0 for name in ("count", "index")
    )
    return hello if is_host else None


def _line(message: object) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _difference(facts: Mapping[str, str], other: Mapping[str, str], peer: int) -> str | None:
    """What a host has otherwise than host 0, in one line."""
    for name in [*facts, *other]:
        if facts.get(name) != other.get(name):
            return (
                f"host {peer} has another {name} than host 0: {str(other.get(name))[:120]}, not "
                f"{str(facts.get(name))[:120]}"
            )
    return None


def _keep_stdout() -> None:
    """Keeps stdout for what Python prints: the library that CPUs exchange by greets there."""
    if sys.stdout is None:
        return
    sys.stdout.flush()
    descriptor, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    sys.stdout = os.fdopen(descriptor, "w", buffering=1, errors="backslashreplace")
