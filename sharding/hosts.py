"""Several hosts that run one engine over one mesh: host 0 decides, the others do the same, and none
outlives another.

JAX brings the devices together (`jax.distributed`). In addition every other host has a connection
to host 0 (`links.py`): its messages take a tenth of the time of JAX's key-value store, and its end
is seen at once. What host 0 does to its engine it tells first, so that the others do it too; what
may differ from host to host (a clock, whether a program is compiled) is host 0's. Both come in one
order, so each host runs the same steps. A host from which nothing comes for `HEARTBEAT_TIMEOUT_S`,
or whose connection ends, is lost, and the process ends with one line.
"""

import contextlib
import json
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from configs.errors import InputError, shown
from sharding import links
from sharding.links import HEARTBEAT_S, HEARTBEAT_TIMEOUT_S, Link

T = TypeVar("T")
Report = Callable[[str, bool], None]  # takes a line, and whether it names a lost host

JOIN_TIMEOUT_S = 60.0
SERVER_JOIN_TIMEOUT_S = 600.0  # in which a machine may be replaced
_LOOK_S = 0.5  # between looks whether a host that has come is still there


class Hosts:
    """The hosts of a mesh, of which this process is one.

    Attributes:
        index: of this one.
        count: how many there are.
    """

    def __init__(self, index: int = 0, count: int = 1, report: Report = lambda *_: None):
        """`report`: gets what this host waits for ("" once all are there), and which one is lost;
        any thread may call it.
        """
        self.index, self.count = index, count
        self._report = report
        self._links: dict[int, Link] = {}  # from host 0 to all others; from each of these to it
        self._inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[int, Mapping[str, str]]] = queue.SimpleQueue()
        self._changing = threading.Lock()
        self._is_complete = count == 1
        self._has_ended = False

    def add(self, peer: int, link: Link) -> None:
        """Adds the connection to another host."""
        with self._changing:
            self._links[peer] = link
            self._is_complete = len(self._links) == (1 if self.index else self.count - 1)
        threading.Thread(target=self._listen, args=(peer, link), daemon=True).start()

    def accept(self, address: str, port: int, patience_s: float) -> None:
        """On host 0: adds all other hosts as they come. One that ends meanwhile may come again.
        Raises InputError if one is not there after `patience_s`, or does not belong here.
        """
        deadline, awaited = time.monotonic() + patience_s, ""
        with links.listening(address, port) as server:
            while not self._is_complete:
                missing = ", ".join(str(i) for i in range(1, self.count) if i not in self._links)
                if missing != awaited:
                    self._report(f"waits for host {missing}", False)
                    awaited = missing
                if time.monotonic() > deadline:
                    raise InputError(f"host {missing} did not come within {patience_s:.0f} s")
                server.settimeout(min(_LOOK_S, patience_s))
                with contextlib.suppress(TimeoutError):
                    self._greet(server.accept()[0])

    def _greet(self, connection: socket.socket) -> None:
        hello = links.received_greeting(connection)
        if hello is None:  # somebody else
            connection.close()
            return
        peer = hello["index"]
        if peer in self._links:  # the first stays
            links.answer(connection, f"host {peer} is there twice: each has its own --host_index")
            connection.close()
            return
        problem = links.problem_of(hello, self.count)
        links.answer(connection, problem)
        if problem:
            raise InputError(problem)
        self.add(peer, Link(connection))

    def check_alone(self, what: str) -> None:
        """Raises InputError where there are others, who would not follow."""
        if self.count > 1:
            raise InputError(f"{what} goes with one host, here are {self.count}")

    def tell(self, order: str, *arguments: object) -> None:
        """From host 0 to all others: an order with values that JSON has; elsewhere nothing."""
        if self.index == 0:
            self._send({"order": order, "arguments": arguments})

    def next_order(self) -> tuple[str, list[Any]]:
        """What host 0 tells next. Raises RuntimeError if something else comes: the hosts are out of
        step.
        """
        message = self._inbox.get()
        return self._part(message, "order"), message["arguments"]

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
                links.difference(facts, facts_by_peer[peer], "host 0", f"host {peer}")
                for peer in sorted(facts_by_peer)
            )
            problem = next(filter(None, problems), None)
            self._send({"problem": problem})
        if problem:
            self._has_ended = True
            raise InputError(f"{problem}; start all with the same flags, files and versions")
        self._report("", False)

    def end(self, why: str | None = None) -> None:
        """Says that this host ends, and, if it should not, why."""
        with self._changing:
            if self._has_ended:
                return
            self._has_ended = True
        self._send({"ended": why})

    def await_loss(self) -> None:
        """After a failure: waits for the loss of a host that may be its cause, which ends the
        process, as long as that can take to be noticed.
        """
        if self.count == 1:
            return
        deadline = time.monotonic() + HEARTBEAT_TIMEOUT_S + HEARTBEAT_S
        while time.monotonic() < deadline:
            time.sleep(0.05)

    def _take(self, what: str) -> Any:
        """The value that host 0 sends next."""
        return self._part(self._inbox.get(), what)

    def _part(self, message: Mapping[str, Any], what: str) -> Any:
        if what not in message:
            raise RuntimeError(
                f"host {self.index} is out of step with host 0: it waits for the next {what}, and "
                f"gets {shown(message)}"
            )
        return message[what]

    def _send(self, message: object) -> None:
        for link in [*self._links.values()]:
            link.send(message)

    def _listen(self, peer: int, link: Link) -> None:
        why = "its connection ended"
        try:
            for line in link.lines:
                message = json.loads(line)
                if "facts" in message:
                    self._answers.put((peer, message["facts"]))
                elif "ended" in message:
                    if self.index and not message["ended"]:  # nothing is left to follow
                        os._exit(0)
                    self._lose(peer, message["ended"] or "it ended")
                elif message:
                    self._inbox.put(message)
        except TimeoutError:
            why = f"it was silent for {HEARTBEAT_TIMEOUT_S:.0f} s"
        except (OSError, ValueError):
            pass
        self._lose(peer, why)

    def _lose(self, peer: int, why: str) -> None:
        """Ends the process, and tells the others why; before all are there, forgets the host."""
        with self._changing:
            if self._has_ended:
                return
            if not self._is_complete:
                self._links.pop(peer, None)
                return
            self._has_ended = True
            line = why if why.startswith("host ") else f"host {peer} is lost: {why}"
            self._report(line, True)
            if self.index == 0:
                for other, link in self._links.items():
                    if other != peer:
                        link.send({"ended": line})
            with contextlib.suppress(OSError):
                os.write(2, f"error: {line}\n".encode())
            os._exit(1)


_current = Hosts()


def current() -> Hosts:
    """The hosts of this process's mesh."""
    return _current


def start(
    coordinator: str,
    count: int,
    index: int,
    report: Report | None = None,
    patience_s: float = JOIN_TIMEOUT_S,
) -> None:
    """Finds the other hosts, and has JAX bring their devices together; before JAX looks for any.
    Host 0 takes the port of `coordinator`, its 'address:port', and the next one.

    Raises:
        InputError: a port is taken, or the others do not come within `patience_s`.
    """
    global _current
    if count == 1:
        return
    address, port = coordinator.rpartition(":")[0], int(coordinator.rpartition(":")[2])
    _current = Hosts(index, count, report or (lambda *_: None))
    if index == 0:
        links.listening(address, port + 1).close()  # JAX's service ends the process if it is taken
        _current.accept(address, port, patience_s)
    else:
        _current.add(0, links.connect(address, port, count, index, patience_s))
    _current.broadcast("all are there")  # JAX ends a process that waits for others in vain
    import jax

    # Otherwise JAX ends the process where another host than host 0 is gone, with a trace of C++.
    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_enable_preemption_service", False)
    _keep_stdout()
    bind = f"{address}:{port + 1}" if links.is_local(address) else None  # None: every address
    jax.distributed.initialize(
        f"{address}:{port + 1}", count, index, cluster_detection_method="deactivate",
        coordinator_bind_address=bind,
    )  # fmt: skip


def _keep_stdout() -> None:
    """Keeps stdout for what Python prints: the library that CPUs exchange by greets there."""
    if sys.stdout is None:
        return
    sys.stdout.flush()
    descriptor, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    sys.stdout = os.fdopen(descriptor, "w", buffering=1, errors="backslashreplace")
