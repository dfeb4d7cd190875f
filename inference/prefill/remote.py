"""Prompts computed by other processes, whose pages come over connections, are kept in the host's
memory, and written where a sequence decodes once it has room there.

A prompt whose process ends goes to another one; it is computed where it decodes while none is
connected, or if this was the second: perhaps it is what ends them. A sequence that is preempted is
computed again there, too. So are prompts of which the results are needed rather than pages: those
that are scored or pooled.
"""

import bisect
import dataclasses
import itertools
import logging
import math
import queue
import time
from collections.abc import Mapping

from configs import prefill
from configs.engine import Config
from configs.errors import InputError
from inference.checkpoints.checkpoint import Checkpoint
from inference.prefill.leaders import sent_pages
from inference.prefill.peer import Event, Peer, facts_of
from inference.prefill.prefiller import Ended, Figures, Prefiller
from inference.runtime.model_runner import ModelRunner
from inference.runtime.swap import HostPages
from inference.scheduling.queue import rank
from inference.scheduling.scheduler import Scheduler
from inference.scheduling.sequence import Sequence, SequenceFault, Status

_WAIT_S = 5e-3
_LOG_EVERY_S = 60.0

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class _Prompt:
    """A prompt that was sent to a process.

    Attributes:
        needed: pages that are to come, (page group, index in the sequence).
        was_lost: an earlier process ended with it.
        pages: those of a prompt that is done.
    """

    leader: Sequence
    peer: Peer
    number: int
    needed: list[tuple[int, int]]
    num_bytes: int
    was_lost: bool
    pages: Mapping[tuple[int, int], HostPages] | None = None

    @property
    def num_outstanding_tokens(self) -> int:
        computed = self.leader.num_unsent_tokens
        return 0 if self.pages is not None else len(self.leader.tokens) - 1 - computed


class RemotePrefill(Prefiller):
    """Has prompts computed by the processes of `prefill.hosts`.

    Attributes:
        peers: these processes.
    """

    def __init__(self, config: Config, receiver: ModelRunner, scheduler: Scheduler):
        """`scheduler`: of the sequences that decode."""
        self._page = config.page_tokens
        self._specs = [group.spec for group in config.cached_model.page_groups]
        pages = [receiver.host_pages(group, 1) for group in range(len(self._specs))]
        super().__init__(receiver, [sum(array.nbytes for array in page) for page in pages])
        self._scheduler = scheduler
        limit = config.prefill.host_bytes
        pages_bytes = config.mesh.model * config.engine.cache.cache_bytes
        self._most_bytes = pages_bytes if limit is None else limit
        self._bandwidth = config.prefill.bandwidth
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.peers = [
            Peer(address, self._events, receiver.host_pages)
            for address in prefill.addresses(config.prefill.hosts or "")
        ]
        self._numbers = itertools.count()
        self._pending: list[Sequence] = []  # leaders that no process has, by rank
        self._prompts: dict[Sequence, _Prompt] = {}  # by leader, those that one has or has sent
        self._by_number: dict[int, _Prompt] = {}  # those that one has
        self._refused: tuple[Sequence, int] | None = None  # for want of room beside so many bytes
        self._lost: set[Sequence] = set()  # pending leaders that a process ended with
        self._logged_at, self._logged = -math.inf, Figures()

    def connect(self, checkpoint: Checkpoint) -> None:
        receiver = self._receiver
        self.start(facts_of(receiver.config, receiver.implementations, checkpoint))

    def start(self, facts: Mapping[str, str]) -> None:
        """Connects to the processes that are there. Raises InputError if one of them has something
        else than `facts`.
        """
        for peer in self.peers:
            peer.start(facts)

    def end(self) -> None:
        """Disconnects for good: prompts are computed where they decode."""
        for peer in self.peers:
            peer.end()

    @property
    def figures(self) -> Figures:
        received = [peer.received for peer in self.peers]
        return Figures(
            sum(num_bytes for num_bytes, _ in received),
            sum(seconds for _, seconds in received),
            sum(peer.is_connected for peer in self.peers),
            self._bandwidth,
        )

    def add(self, sequence: Sequence) -> None:
        """Begins with the prompt of a sequence that waits to decode; one that has a single token,
        or is only read, is computed where it decodes, and so are all while none is connected.
        """
        if len(sequence.tokens) > 1 and not sequence.is_only_read and self._is_connected:
            bisect.insort(self._pending, self._lead(sequence), key=rank)

    def launch(self) -> None:
        """Takes news, and sends prompts, as far as the host has room for their pages."""
        self._take_events()
        self.finish_aborted()
        self._send_prompts()
        self._log_bandwidth()

    def commit(self, waits: bool) -> Ended:
        """Takes news, and waits for some for a few milliseconds; no sequence ends with that."""
        if waits and self._by_number:
            try:
                event = self._events.get(timeout=_WAIT_S)
            except queue.Empty:
                return iter(())
            self._take(event)
            self._take_events()
        return iter(())

    def finish_steps(self) -> Ended:
        """Nothing: there are none in this process."""
        return iter(())

    def start_over(self) -> None:
        """Nothing: what has come is in the host's memory."""

    def fail(self, fault: SequenceFault) -> None:
        raise fault  # no leader runs here

    def check_params_stay(self, what: str) -> None:
        names = ",".join(peer.name for peer in self.peers)
        raise InputError(
            f"{what}: goes without prefill.hosts ({names}), which keep the weights that they have"
        )

    @property
    def _is_connected(self) -> bool:
        return any(peer.is_connected for peer in self.peers)

    def _take_events(self) -> None:
        while not self._events.empty():
            self._take(self._events.get())

    def _take(self, event: Event) -> None:
        if event.number is None:
            for lost in [p for p in self._by_number.values() if p.peer is event.peer]:
                if lost.was_lost:
                    self._finish(lost.leader)
                    continue
                self._drop(lost)
                bisect.insort(self._pending, lost.leader, key=rank)
                self._lost.add(lost.leader)
            return
        prompt = self._by_number.get(event.number)
        if prompt is None:  # aborted
            return
        if not event.is_done or not self._has_come(prompt):
            self._finish(prompt.leader)

    def _has_come(self, prompt: _Prompt) -> bool:
        """Notes that a prompt is computed; False where pages are missing."""
        pages, leader = prompt.peer.take(prompt.number), prompt.leader
        if any(page not in pages for page in prompt.needed):
            return False
        del self._by_number[prompt.number]
        prompt.pages = pages
        num_pages = -(-(len(leader.tokens) - 1) // self._page)
        leader.pages = [[0] * num_pages for _ in self._specs]
        for group, index in prompt.needed:
            leader.pages[group][index] = 1 + index
        leader.num_computed_tokens = len(leader.tokens) - 1
        leader.status = Status.RUNNING  # there
        return True

    def _send_prompts(self) -> None:
        """Sends pending prompts, each to the process with the fewest tokens to compute."""
        while self._pending:
            connected = [peer for peer in self.peers if peer.is_connected]
            leader = self._pending[0]
            if not connected:
                self._finish(leader)
                continue
            held_bytes = sum(prompt.num_bytes for prompt in self._prompts.values())
            if self._prompts and self._refused == (leader, held_bytes):
                return  # what matches need not be looked up again
            leader.num_unsent_tokens = self._num_cached_tokens(leader)
            needed = self._needed(leader)
            num_bytes = sum(self._page_bytes[group] for group, _ in needed)
            if self._prompts and held_bytes + num_bytes > self._most_bytes:
                self._refused = leader, held_bytes
                return
            del self._pending[0]
            loads = dict.fromkeys(connected, 0)
            for other in self._by_number.values():
                if other.peer in loads:
                    loads[other.peer] += other.num_outstanding_tokens
            peer = min(connected, key=loads.__getitem__)
            was_lost = leader in self._lost
            prompt = _Prompt(leader, peer, next(self._numbers), needed, num_bytes, was_lost)
            self._lost.discard(leader)
            self._prompts[leader] = self._by_number[prompt.number] = prompt
            peer.prefill(
                prompt.number, leader.tokens, leader.params.cache_salt, leader.params.priority,
                leader.num_unsent_tokens,
            )  # fmt: skip

    def _num_cached_tokens(self, leader: Sequence) -> int:
        """Tokens whose pages every data shard has cached."""
        matches = [shard.pages.match_prefix(leader) for shard in self._scheduler.shards]
        return min(match.num_tokens for match in matches)

    def _needed(self, leader: Sequence) -> list[tuple[int, int]]:
        num_tokens = len(leader.tokens) - 1
        span = range(leader.num_unsent_tokens // self._page, -(-num_tokens // self._page))
        return [
            (group, index)
            for group, spec in enumerate(self._specs)
            for index in sent_pages(spec, span, num_tokens, self._page)
        ]

    def _send(self, leader: Sequence, pages: tuple[tuple[int, int, int], ...], shard: int) -> None:
        stored = self._prompts[leader].pages
        assert stored is not None
        for group, same in itertools.groupby(sorted(pages), lambda page: page[0]):
            moves = list(same)
            data = [stored[group, source - 1] for _, source, _ in moves]
            self._receiver.write_pages(group, [target for *_, target in moves], data, shard)

    def _drop(self, prompt: _Prompt) -> None:
        """Forgets what a process has of a prompt."""
        del self._prompts[prompt.leader]
        if self._by_number.pop(prompt.number, None):
            prompt.peer.forget(prompt.number)

    def _finish(self, leader: Sequence) -> None:
        leader.status = Status.FINISHED
        if leader in self._prompts:
            self._drop(self._prompts[leader])
        elif leader in self._pending:
            self._pending.remove(leader)
            self._lost.discard(leader)
        super()._finish(leader)

    def _log_bandwidth(self) -> None:
        """A line about what has come lately, beside the plan's bandwidth."""
        now, figures = time.monotonic(), self.figures
        num_bytes = figures.received_bytes - self._logged.received_bytes
        seconds = figures.received_s - self._logged.received_s
        if not (num_bytes and seconds) or now - self._logged_at < _LOG_EVERY_S:
            return
        bandwidth = num_bytes / seconds
        planned = "" if self._bandwidth is None else f" (planned {self._bandwidth / 1e6:,.0f} MB/s)"
        _log.warning(
            "pages of prompts: %.1f MB came at %.0f MB/s%s from %d prefill processes",
            num_bytes / 1e6, bandwidth / 1e6, planned, figures.num_connected,
        )  # fmt: skip
        self._logged_at, self._logged = now, figures
