"""Where prompts are computed, if not by the engine that decodes."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from typing import NamedTuple

from inference.checkpoints.checkpoint import Checkpoint
from inference.prefill.leaders import leader_of
from inference.runtime.model_runner import ModelRunner
from inference.scheduling.sequence import FinishReason, Sequence, SequenceFault, Status
from inference.scheduling.step_schedule import StepSchedule

Ended = Iterator[tuple[Sequence, FinishReason]]


class Figures(NamedTuple):
    """Of pages that other processes have computed.

    Attributes:
        received_bytes, received_s: of their frames, once these began.
        num_connected: processes that are there; None: prompts are computed in this one.
        planned_bandwidth: bytes a second, as `prefill.bandwidth`.
    """

    received_bytes: int = 0
    received_s: float = 0.0
    num_connected: int | None = None
    planned_bandwidth: float | None = None


class Prefiller:
    """Computes prompts for one engine, all of each but its last token: a *leader* of the request's
    first sequence, which waits for it among those that decode. The scheduler there admits the
    sequence when it has room, and the pages move before the step that feeds its last token.

    Attributes:
        sent_bytes: of pages that were admitted so far, copies on several chips included where
            these get them from other chips.
    """

    def __init__(self, receiver: ModelRunner, page_bytes: Items[int]):
        """`page_bytes` are what moves of a page of each group."""
        self._receiver, self._page_bytes = receiver, page_bytes
        receiver.before_admit = self.send
        self._led: dict[Sequence, Sequence] = {}  # leader -> the sequence that waits for it
        self.sent_bytes = 0

    @property
    def runners(self) -> list[ModelRunner]:
        """That compute prompts in this process."""
        return []

    @property
    def compile_s(self) -> float:
        """Seconds spent compiling in this process."""
        return 0.0

    @property
    def figures(self) -> Figures:
        """Of what has come from other processes."""
        return Figures()

    def connect(self, checkpoint: Checkpoint) -> None:
        """Connects to the processes that compute prompts, if others do; `checkpoint` has the
        receiver's weights. Raises InputError if one of them has something else than the receiver.
        """

    def warm_up(self, progress: Callable[[], None], seals: bool) -> None:
        """As `Engine.warm_up`, and what receives pages."""
        self._receiver.compile_page_copies()

    def add(self, sequence: Sequence) -> None:
        """Begins with the prompt of a sequence that waits to decode, or leaves it to be computed
        there.
        """
        raise NotImplementedError

    def launch(self) -> None:
        """Goes on with prompts, and does not wait."""
        raise NotImplementedError

    def commit(self, waits: bool) -> Ended:
        """Takes what was computed, and waits for some if it `waits`. Yields the sequences that end
        with their prompts.
        """
        raise NotImplementedError

    def finish_steps(self) -> Ended:
        """Commits all steps in flight in this process; yields what `commit` does."""
        raise NotImplementedError

    def start_over(self) -> None:
        """Forgets what was computed and is lost with the receiver's pages."""
        raise NotImplementedError

    def fail(self, fault: SequenceFault) -> None:
        """Ends a leader that a fault lies in."""
        raise NotImplementedError

    def check_params_stay(self, what: str) -> None:
        """Raises InputError where prompts would be computed with other weights after `what`."""

    def send(self, schedule: StepSchedule) -> None:
        """Sends the pages that a step's admissions need; their leaders are done then."""
        for admission in (a for shard in schedule.shards for a in shard.admissions):
            if admission.sender is not None:
                self._send(admission.sender, admission.sent_pages, admission.sequence.shard)
                self.sent_bytes += sum(self._page_bytes[g] for g, *_ in admission.sent_pages)
                self._finish(admission.sender)

    def _send(self, leader: Sequence, pages: tuple[tuple[int, int, int], ...], shard: int) -> None:
        """Writes pages of a leader, (group, from, to) each, into those of a data shard."""
        raise NotImplementedError

    def _lead(self, sequence: Sequence) -> Sequence:
        """A leader of a sequence, which waits for it from now on."""
        leader = leader_of(
            sequence.id, sequence.params, list(sequence.tokens), sequence.prefix.key,
            sequence.history.arrival_s,
        )  # fmt: skip
        self._led[leader] = sequence
        sequence.leader = leader
        return leader

    def finish_aborted(self) -> None:
        """Ends the leaders of sequences that have ended."""
        for leader, sequence in list(self._led.items()):
            if sequence.status is Status.FINISHED:
                self._finish(leader)

    def _finish(self, leader: Sequence) -> None:
        """Ends a leader; a sequence that still needs its prompt computes it where it decodes."""
        if sequence := self._led.pop(leader, None):
            sequence.leader = None
