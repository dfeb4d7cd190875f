"""The slots of running sequences, and what the next step writes into them."""

from bisect import insort

from configs.engine import Config
from inference.kv_pages.prefix_cache import Match
from inference.scheduling import queue
from inference.scheduling.page_manager import PageManager
from inference.scheduling.sequence import Sequence, Status
from inference.scheduling.step_schedule import Admission


class SlotManager:
    """Gives running sequences their slots.

    Attributes:
        running: those that have one, by rank.
        admissions: what the step that is scheduled next writes, in this order.
    """

    def __init__(self, config: Config, pages: PageManager):
        self._config = config
        self._pages = pages
        self.running: list[Sequence] = []
        self.free_slots = list(range(config.engine.max_seqs - 1, -1, -1))
        self.admissions: list[Admission] = []

    def start(self, sequence: Sequence, match: Match) -> None:
        """Gives a waiting sequence a slot and the pages of its cached prefix."""
        self._pages.attach(sequence, match)
        self.admissions.append(Admission(sequence, self._allocate(sequence)))

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Starts a child on what is computed of its parent; False, with nothing changed, where
        there is no room or where the parent's state is not the one that the child continues from.
        """
        num_computed = min(parent.num_computed_tokens, len(child.tokens) - 1)
        is_settled = not self._config.model.has_states or (
            not parent.num_rows_in_flight and parent.num_computed_tokens == num_computed
        )
        is_written = parent.slot is not None and not self._is_admitted(parent)
        if not (is_written and is_settled and self.free_slots):
            return False
        child.num_computed_tokens = child.num_scheduled_tokens = num_computed
        copies = self._pages.fork(parent, child)
        if copies is None:
            child.num_computed_tokens = child.num_scheduled_tokens = 0
            return False
        if not self._config.engine.prefix_cache:  # its pages go by the parent's key
            child.cache_key = None
        self.admissions.append(Admission(child, self._allocate(child), parent.slot, copies))
        return True

    def rewrite(self, sequence: Sequence) -> None:
        """Tells the device another last token of a running sequence."""
        if sequence.slot is not None and not self._is_admitted(sequence):
            self.admissions.append(Admission(sequence, sequence.slot, sequence.slot))

    def stop(self, sequence: Sequence) -> None:
        """Frees slot and pages of a running sequence."""
        assert sequence.slot is not None
        self._pages.free(sequence)
        self.free_slots.append(sequence.slot)
        self.running.remove(sequence)
        for admission in self.admissions:
            if admission.sequence is sequence:
                self._pages.cancel_copies(admission.page_copies)
        self.admissions = [a for a in self.admissions if a.sequence is not sequence]
        sequence.slot = None

    def check_integrity(self) -> None:
        """Raises RuntimeError where slots or pages do not add up."""
        self._pages.check_integrity(self.running)
        slots = [s.slot for s in self.running if s.slot is not None]
        if sorted([*slots, *self.free_slots]) != list(range(self._config.engine.max_seqs)):
            raise RuntimeError(f"slots {slots} and free slots {self.free_slots} do not add up")

    def _allocate(self, sequence: Sequence) -> int:
        slot = self.free_slots.pop()
        sequence.slot, sequence.status = slot, Status.RUNNING
        insort(self.running, sequence, key=queue.rank)
        return slot

    def _is_admitted(self, sequence: Sequence) -> bool:
        """Whether the next step writes the sequence's slot anyway."""
        return any(admission.sequence is sequence for admission in self.admissions)
