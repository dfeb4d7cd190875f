"""The connection of an engine that decodes to one process that computes prompts.

Both send lines of JSON (`sharding/links.py`). The engine begins with what both must have in common,
and gets what is different, or nothing. Then it sends prompts, each under a number, and gets their
pages while they are computed, some of one page group at a time: their indices in the sequence, and
the bytes of each array behind it.
"""

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from configs.engine import Config
from configs.errors import InputError
from inference import alike
from inference.checkpoints.checkpoint import Checkpoint
from inference.runtime.swap import HostPages
from sharding.links import HEARTBEAT_S, HEARTBEAT_TIMEOUT_S, Link

_PROTOCOL = "1"  # of what follows a connection's beginning; another number with any change
_RETRY_S = 0.5
_RETRY_OTHER_S = 10.0  # of a process that computes something else

_log = logging.getLogger(__name__)


def facts_of(config: Config, implementations: str, checkpoint: Checkpoint) -> dict[str, str]:
    """What both ends must have in common: what the bytes of cached pages depend on, and the order
    of messages. `implementations` are the runner's.
    """
    return alike.of_model(config, checkpoint) | {
        "protocol of prefill processes": _PROTOCOL,
        "implementation of products and attention": implementations,
        "engine.cache.page_tokens": str(config.page_tokens),
        "engine.cache.row_multiple": str(config.engine.cache.row_multiple or 1),
        "engine.deterministic": str(config.engine.deterministic),
        "mesh.model": str(config.mesh.model),
    }


class Event(NamedTuple):
    """News of a prompt: it is `done` or not, in which case it is computed elsewhere; of all prompts
    of a connection that has ended if `number` is None.
    """

    peer: "Peer"
    number: int | None
    is_done: bool = False


class Peer:
    """A process that computes prompts, connected whenever it is there.

    Attributes:
        name: its 'host:port'.
        is_connected: whether prompts can be sent to it.
        received: bytes of pages, and the seconds that these took once their frames began.
    """

    def __init__(
        self,
        address: tuple[str, int],
        events: "queue.SimpleQueue[Event]",
        room: Callable[[int, int], HostPages],
    ):
        """`events` gets news, from another thread; `room(group, n)` returns arrays for pages."""
        self._address, self.name = address, f"{address[0]}:{address[1]}"
        self._events, self._room = events, room
        self._link: Link | None = None
        self._outbox: queue.SimpleQueue[tuple[Link, object]] = queue.SimpleQueue()
        self._stored: dict[int, dict[tuple[int, int], HostPages]] = {}  # by the prompt's number
        self.is_connected = self._has_ended = False
        self.received: tuple[int, float] = 0, 0.0

    def start(self, facts: Mapping[str, str]) -> None:
        """Connects, now or as soon as the other is there. Raises InputError if it is there, and has
        something else than `facts`.
        """
        link = self._connect(facts)
        threading.Thread(target=self._run, args=(facts, link), daemon=True).start()
        threading.Thread(target=self._send_all, daemon=True).start()

    def end(self) -> None:
        """Disconnects for good."""
        self._has_ended = True
        if self._link is not None:
            self._link.end()

    def prefill(
        self, number: int, tokens: list[int], salt: str | None, priority: int, num_cached: int
    ) -> None:
        """Sends a prompt; the pages of its first `num_cached` tokens are not needed."""
        self._stored[number] = {}
        prompt = {"tokens": tokens, "salt": salt, "priority": priority, "cached": num_cached}
        self._send({"prefill": number, **prompt})

    def forget(self, number: int) -> None:
        """A prompt, or what has come of it, is not needed any more."""
        if self._stored.pop(number, None) is not None:
            self._send({"abort": number})

    def take(self, number: int) -> dict[tuple[int, int], HostPages]:
        """Pages of a prompt that is done, by (page group, index in the sequence)."""
        return self._stored.pop(number)

    def _send(self, message: object) -> None:
        if self._link is not None:
            self._outbox.put((self._link, message))

    def _send_all(self) -> None:
        """Sends in another thread, as one that reads nothing must not delay who decodes."""
        while True:
            link, message = self._outbox.get()
            link.send(message)

    def _connect(self, facts: Mapping[str, str]) -> Link | None:
        """A connection that the other side has accepted; None: there is none yet. Raises InputError
        if it refuses, or answers what no such process does.
        """
        try:
            link = Link(socket.create_connection(self._address, timeout=HEARTBEAT_S))
        except OSError:
            return None
        is_accepted = False
        try:
            link.send({"facts": dict(facts)})
            answer = next(link.messages(), None)
            if answer is None:
                return None
            problem = answer["problem"]
            is_accepted = problem is None
        except OSError:  # it ends, or is silent: perhaps it still starts
            return None
        except (ValueError, KeyError, TypeError):
            problem = f"what answers at {self.name} computes no prompts"
        finally:
            if not is_accepted:
                link.close()
        if problem is not None:
            raise InputError(f"prefill.hosts={self.name}: {problem}")
        return link

    def _run(self, facts: Mapping[str, str], link: Link | None) -> None:
        """Reads what comes, and connects again whenever that ends."""
        is_refused = False
        while not self._has_ended:
            if link is not None:
                is_refused = False
                self._read(link)
            time.sleep(_RETRY_OTHER_S if is_refused else _RETRY_S)
            link = None
            try:
                if not self._has_ended:
                    link = self._connect(facts)
            except Exception as error:  # it refuses; or there is no thread, or no memory
                if not is_refused:
                    _log.warning("%s", error if isinstance(error, InputError) else repr(error))
                is_refused = True

    def _read(self, link: Link) -> None:
        why = "its connection ended"
        self._link, self.is_connected = link, True
        if self._has_ended:  # before `end` could know of this one
            link.end()
        try:
            for message in link.messages():
                if "pages" in message:
                    self._receive(link, message["pages"], message["group"], message["indices"])
                else:
                    self._events.put(Event(self, message["ended"], bool(message["done"])))
        except TimeoutError:
            why = f"it was silent for {HEARTBEAT_TIMEOUT_S:.0f} s"
        except OSError:
            pass
        except Exception as error:
            why = f"what it sent cannot be read ({error!r})"
        finally:
            self.is_connected = False
            self._events.put(Event(self, None))
            link.close()
        if not self._has_ended:
            _log.warning("prefill process %s is lost: %s", self.name, why)

    def _receive(self, link: Link, number: int, group: int, indices: list[int]) -> None:
        """Stores pages, as views of arrays with some of them."""
        start, arrays = time.perf_counter(), self._room(group, len(indices))
        for array in arrays:
            buffer = bytes_of(array)
            if link.lines.readinto(buffer) < len(buffer):
                raise ConnectionError("it ended within a page")
        num_bytes, seconds = self.received
        num_bytes += sum(array.nbytes for array in arrays)
        self.received = num_bytes, seconds + time.perf_counter() - start
        if (pages := self._stored.get(number)) is not None:  # else it is forgotten
            for at, index in enumerate(indices):
                pages[group, index] = [_part(array, at, len(indices)) for array in arrays]


def bytes_of(array: np.ndarray) -> memoryview:
    """The bytes of a contiguous array, of any type."""
    return array.reshape(-1).view(np.uint8).data


def _part(array: np.ndarray, index: int, count: int) -> np.ndarray:
    """One of `count` pages."""
    parts: int = len(array) // count
    return array[index * parts : (index + 1) * parts]
