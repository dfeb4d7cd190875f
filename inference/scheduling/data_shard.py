"""The sequences of one data shard: their slots and pages, and what the next step writes there."""

import itertools
from bisect import insort

from configs.engine import Config
from inference.kv_pages.prefix_cache import Match, PageCosts
from inference.scheduling import queue
from inference.scheduling.admission_control import AdmissionControl, LengthStatistics
from inference.scheduling.page_manager import PageManager
from inference.scheduling.sequence import Sequence, Status
from inference.scheduling.step_schedule import Admission


class DataShard:
    """Slots and pages of chips that compute one part of each step's rows.

    Attributes:
        pages: on these chips, and offloaded from them.
        running: sequences that have a slot, by rank.
        free_slots: those without a sequence.
        admissions: what the step that is scheduled next writes, in this order.
        admission_control: says which sequences may start.
    """

    def __init__(
        self,
        config: Config,
        index: int,
        costs: PageCosts,
        lengths: LengthStatistics,
        snapshot_tokens: int = 0,
    ):
        """`index` is what `Sequence.shard` becomes; `costs` and `snapshot_tokens` as
        `PageManager` takes them; `lengths` are those of the engine.
        """
        self._config = config
        self._index = index
        self._lengths = lengths
        self.pages = PageManager(config, costs, snapshot_tokens)
        self.running: list[Sequence] = []
        self.free_slots = list(range(config.engine.max_seqs - 1, -1, -1))
        self.admissions: list[Admission] = []
        self.admission_control = AdmissionControl(config, self.pages, lengths)

    @property
    def num_outstanding_tokens(self) -> int:
        """Tokens still to compute for its sequences, as far as the lengths of earlier ones tell."""
        return sum(
            sequence.num_pending_tokens
            + self._lengths.remaining(
                sequence.num_output_tokens, max(0, sequence.num_remaining_tokens)
            )
            for sequence in self.running
        )

    def will_fit(self, sequence: Sequence, match: Match) -> bool:
        """Whether a waiting sequence can start here on the cached prefix that was found."""
        will_fit = self.admission_control.will_fit
        return self.pages.has_room(sequence, match) and will_fit(sequence, match, self.running)

    def start(self, sequence: Sequence, match: Match) -> None:
        """Gives a waiting sequence a slot and the pages of its cached prefix; for the rest of a
        prompt that other chips have computed, pages to receive it. If a part that they do not send
        has left the cache meanwhile, all of the rest is computed here.
        """
        self.pages.attach(sequence, match)
        sequence.note_hit()
        sender, sent = sequence.sender, tuple[tuple[int, int, int], ...]()
        if sender is not None and sender.num_unsent_tokens <= match.num_tokens:
            sent = self.pages.receive(sequence, sender)
        slot = self._allocate(sequence)
        snapshot = self.pages.started_from(sequence)
        self.admissions.append(
            Admission(sequence, slot, sender=sender, sent_pages=sent, snapshot=snapshot)
        )

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Starts a child on what is computed of its parent; False, with nothing changed, where
        there is no room or where the parent's state is not the one that the child continues from.
        """
        num_computed = min(parent.num_computed_tokens, len(child.tokens) - 1)
        is_settled = not self._config.model.has_states or (
            not parent.in_flight.num_rows and parent.num_computed_tokens == num_computed
        )
        is_received = parent.leader is not None and parent.sender is not None  # it has no states
        is_written = is_received or not self._is_admitted(parent)
        if not (parent.slot is not None and is_written and is_settled and self.free_slots):
            return False
        child.num_computed_tokens = child.num_scheduled_tokens = num_computed
        copies = self.pages.fork(parent, child)
        if copies is None:
            child.num_computed_tokens = child.num_scheduled_tokens = 0
            return False
        child.note_hit()
        if not self._config.engine.cache.prefix_cache:  # its pages go by the parent's key
            child.prefix.key = None
        self.admissions.append(Admission(child, self._allocate(child), parent.slot, copies))
        return True

    def rewrite(self, sequence: Sequence) -> None:
        """Tells the device another last token of a running sequence."""
        if sequence.slot is not None and not self._is_admitted(sequence):
            self.admissions.append(Admission(sequence, sequence.slot, sequence.slot))

    def stop(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self.pages.free(sequence)
        self.free_slots.append(sequence.slot)
        self.running.remove(sequence)
        for admission in self.admissions:
            if admission.sequence is sequence:
                self.pages.cancel_copies(admission.page_copies)
        self.admissions = [a for a in self.admissions if a.sequence is not sequence]
        sequence.slot = None

    def take_admissions(self) -> tuple[Admission, ...]:
        """What the step that is scheduled now writes."""
        taken, self.admissions = tuple(self.admissions), []
        return taken

    def usage(self) -> tuple[int, ...]:
        """`PageManager.prompt_usage` of its sequences, and `usage`, one group behind the other."""
        groups = self.pages.usage(self.running)
        return (*self.pages.prompt_usage(self.running), *itertools.chain.from_iterable(groups))

    def check_integrity(self) -> None:
        self.pages.check_integrity(self.running)
        slots = [s.slot for s in self.running if s.slot is not None]
        if sorted([*slots, *self.free_slots]) != list(range(self._config.engine.max_seqs)):
            raise RuntimeError(f"slots {slots} and free slots {self.free_slots} do not add up")

    def _allocate(self, sequence: Sequence) -> int:
        slot = self.free_slots.pop()
        sequence.shard, sequence.slot, sequence.status = self._index, slot, Status.RUNNING
        insort(self.running, sequence, key=queue.rank)
        return slot

    def _is_admitted(self, sequence: Sequence) -> bool:
        """Whether the next step writes the sequence's slot anyway."""
        return any(admission.sequence is sequence for admission in self.admissions)
