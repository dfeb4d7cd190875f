"""A process that computes prompts for engines that decode in others.

It reads prompts from any number of connections (`peer.py` is their other end), and computes them as
leaders. Pages go out as soon as they are full; reads of the device wait behind the steps that were
launched, and another thread sends what they give. A connection that ends takes its prompts along.
"""

import dataclasses
import itertools
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any, NoReturn

from configs.errors import InputError
from inference.prefill.leaders import Leaders, is_complete, leader_of, sent_pages
from inference.prefill.peer import bytes_of
from inference.request import SamplingParams
from inference.runtime import swap
from inference.runtime.swap import PageCopies
from inference.scheduling.sequence import (
    FinishReason,
    Sequence,
    SequenceFault,
    Status,
    cache_key,
)
from sharding import links
from sharding.links import Link

_MOST_READS = 4  # of a connection that wait to be sent; each keeps `swap.PAGES` on the device
_IDLE_S, _BUSY_S = 1.0, 1e-3
_ACCEPT_AGAIN_S = 0.1
_HUNG_S, _LOOK_S = 30.0, 1.0  # as a server ends an engine that is silent

_log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class _Job:
    """A prompt of a client, under the client's number.

    Attributes:
        num_passed_pages: its first pages that were sent, or need not be.
    """

    client: "_Client"
    number: int
    leader: Sequence
    num_passed_pages: int


class _Client:
    """An engine that decodes: its prompts, and what waits to be sent to it."""

    def __init__(self, link: Link, leaders: Leaders):
        self._link, self._leaders = link, leaders
        self.jobs: dict[int, _Job] = {}
        self._outbox: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._send_all, daemon=True).start()

    @property
    def is_full(self) -> bool:
        return self._outbox.qsize() >= _MOST_READS

    def send_pages(self, number: int, group: int, indices: list[int], data: PageCopies) -> None:
        self._outbox.put({"pages": number, "group": group, "indices": indices, "data": data})

    def send_end(self, number: int, is_done: bool) -> None:
        self._outbox.put({"ended": number, "done": is_done})

    def end(self) -> None:
        self._outbox.put(None)

    def _send_all(self) -> None:
        while (message := self._outbox.get()) is not None:
            message, arrays = dict(message), []
            data = message.pop("data", None)
            if data is not None:
                try:
                    arrays = self._leaders.model_runner.host_pages(
                        message["group"], len(message["indices"]), data
                    )
                except BaseException:  # of the device: the main thread sees its own
                    _log.exception("pages could not be read")
                    self._link.end()
                    continue
            self._link.send(message, *map(bytes_of, arrays))


class PromptServer:
    """Serves prompts to all that connect; `run` is its one loop."""

    def __init__(self, leaders: Leaders, facts: Mapping[str, str], listening: socket.socket):
        """`facts`: what clients must have in common with it."""
        self._leaders, self._facts, self._listening = leaders, facts, listening
        self._config = leaders.model_runner.config
        self._specs = [group.spec for group in self._config.cached_model.page_groups]
        self._jobs: dict[Sequence, _Job] = {}
        self._ids = itertools.count()
        self._turned_at = time.monotonic()
        self._inbox: queue.SimpleQueue[tuple[_Client, dict[str, Any] | None]] = queue.SimpleQueue()
        threading.Thread(target=self._accept, daemon=True).start()

    def run(self) -> NoReturn:
        """Serves until an error of the device, or another that no prompt is to blame for, which it
        raises; a turn that hangs ends the process.
        """
        self._turned_at = time.monotonic()
        threading.Thread(target=self._end_if_hung, daemon=True).start()
        while True:
            self.turn(_IDLE_S)

    def turn(self, wait_s: float) -> None:
        """Takes messages, which it waits for where there is nothing to do, runs a step, and sends
        the pages that are full.
        """
        self._turned_at = time.monotonic()
        if not (self._jobs or len(self._leaders)):
            self._take(wait_s)
        while not self._inbox.empty():
            self._take(0.0)
        is_launched = False
        try:
            is_launched = self._leaders.launch()
            for leader in self._leaders.commit(waits=not is_launched):
                if job := self._jobs.get(leader):  # it gave non-finite logits
                    self._end(job, is_done=False)
        except SequenceFault as fault:
            self._start_over(fault)
        has_sent = [self._send_pages(job) for job in list(self._jobs.values())]
        if not (is_launched or len(self._leaders) or any(has_sent)):  # connections are slower
            self._take(_BUSY_S)

    def _take(self, wait_s: float) -> None:
        """Takes a message, if one comes in time."""
        try:
            client, message = self._inbox.get(timeout=wait_s)
        except queue.Empty:
            return
        if message is None:
            for job in list(client.jobs.values()):
                self._forget(job)
            client.end()
        elif "prefill" in message:
            self._add(client, message)
        elif message["abort"] in client.jobs:
            self._forget(client.jobs[message["abort"]])

    def _add(self, client: _Client, message: Mapping[str, Any]) -> None:
        number, tokens, id = message["prefill"], message["tokens"], next(self._ids)
        key = cache_key(self._config.engine.cache, id, message["salt"])
        try:
            params = SamplingParams(max_new_tokens=1, priority=message["priority"])
            leader = leader_of(id, params, tokens, key, time.perf_counter())
            self._leaders.scheduler.add(leader)
        except InputError:  # it never fits here, or has no such priority
            client.send_end(number, is_done=False)
            return
        job = _Job(client, number, leader, message["cached"] // self._config.page_tokens)
        self._jobs[leader] = client.jobs[number] = job

    def _send_pages(self, job: _Job) -> bool:
        """Sends pages of a prompt that are computed, as far as there is room for reads of them;
        returns whether it sent some, or was done.
        """
        leader, client, page = job.leader, job.client, self._config.page_tokens
        if leader.status is not Status.RUNNING or client.is_full:
            return False
        num_tokens, is_done = len(leader.tokens) - 1, is_complete(leader)
        stop = -(-num_tokens // page) if is_done else leader.num_computed_tokens // page
        is_new = is_done or job.num_passed_pages < stop
        while job.num_passed_pages < stop and not client.is_full:
            first = job.num_passed_pages
            job.num_passed_pages = min(first + swap.PAGES, stop)
            for group, spec in enumerate(self._specs):
                span = range(first, job.num_passed_pages)
                if indices := sent_pages(spec, span, num_tokens, page):
                    pages = [leader.pages[group][index] for index in indices]
                    data = self._leaders.model_runner.read_pages(group, pages)
                    client.send_pages(job.number, group, indices, data)
        if is_done and job.num_passed_pages >= stop:
            self._end(job, is_done=True)
        return is_new

    def _end(self, job: _Job, is_done: bool) -> None:
        self._forget(job)
        job.client.send_end(job.number, is_done)

    def _forget(self, job: _Job) -> None:
        self._leaders.scheduler.finish(job.leader, FinishReason.ABORT)
        del self._jobs[job.leader], job.client.jobs[job.number]

    def _start_over(self, fault: SequenceFault) -> None:
        """Computes all prompts again, except the one with the fault: its pages may be half
        changed.
        """
        self._leaders.clear()
        self._leaders.model_runner.reset()
        self._leaders.start_over(self._jobs)
        self._leaders.scheduler.fail(fault)

    def _end_if_hung(self) -> None:
        """Ends the process, which is started again, where a turn takes too long for one that does
        not compile: clients have its prompts computed elsewhere.
        """
        executables = self._leaders.model_runner.executables
        while executables.is_compiling or time.monotonic() - self._turned_at <= _HUNG_S:
            if executables.is_compiling:
                self._turned_at = time.monotonic()
            time.sleep(_LOOK_S)
        _log.error("no step has ended for %.0f s: this process ends", _HUNG_S)
        os._exit(1)

    def _accept(self) -> None:
        has_failed = False
        while True:
            try:
                connection = self._listening.accept()[0]
                threading.Thread(target=self._read, args=(connection,), daemon=True).start()
            except (OSError, RuntimeError) as error:  # no files are left, or no threads
                if self._listening.fileno() < 0:
                    return
                if not has_failed:
                    _log.warning("no engine can connect now: %s", error)
                has_failed = True
                time.sleep(_ACCEPT_AGAIN_S)
            else:
                has_failed = False

    def _read(self, connection: socket.socket) -> None:
        """Reads what a client sends, until it ends, or sends what no engine does."""
        link, client, number = Link(connection), None, -1
        try:
            for message in link.messages():
                if client is None:
                    facts = message.get("facts")
                    if not isinstance(facts, dict):
                        break
                    problem = links.difference(
                        facts, self._facts, "this engine", "the prefill process"
                    )
                    link.send({"problem": problem})
                    if problem is not None:
                        break
                    client = _Client(link, self._leaders)
                elif _is_valid(message, self._config.model.vocab_size, number):
                    number = message.get("prefill", number)
                    self._inbox.put((client, message))
                else:
                    break
        except (OSError, ValueError):  # it ended, or is no such engine
            pass
        finally:
            if client is not None:
                self._inbox.put((client, None))
            link.close()


def _is_valid(message: Mapping[str, Any], vocab_size: int, number: int) -> bool:
    """Whether a message is one that `Peer` sends, after a prompt of that number."""
    types = {"prefill": int, "tokens": list, "salt": str | None, "priority": int, "cached": int}
    if message.keys() == {"abort"}:
        return isinstance(message["abort"], int)
    return (
        message.keys() == types.keys()
        and all(isinstance(message[name], kind) for name, kind in types.items())
        and message["prefill"] > number
        and len(message["tokens"]) > 1
        and 0 <= message["cached"] < len(message["tokens"])
        and all(isinstance(t, int) and 0 <= t < vocab_size for t in message["tokens"])
    )
