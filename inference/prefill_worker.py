"""Prompts computed on chips of their own, whose pages then move to the chips that decode.

The worker has a scheduler, pages and steps of its own. For each request it computes all of the
prompt but its last token (a *leader* of the request's first sequence, which waits for it among
those that decode). The scheduler there admits the sequence when it has room, and the pages move
before the step that feeds its last token. So decoding, with all that sampling means, is as
everywhere, and a decoding step waits for no prompt.

Prefixes are cached on both sides. A sequence that is preempted while it decodes is computed again,
or its pages swapped in, where it decodes.
"""

from collections.abc import Callable, Iterable, Iterator

from configs.engine import Config
from configs.errors import InputError
from inference.planner import cache_policy
from inference.runtime.model_runner import ModelRunner
from inference.runtime.steps_in_flight import StepsInFlight
from inference.scheduling.scheduler import Scheduler
from inference.scheduling.sequence import FinishReason, History, Prefix, Sequence, Status
from inference.scheduling.step_schedule import StepSchedule
from inference.scheduling.step_shapes import StepShape
from layers.kernels.linear import api as linear
from layers.params import Params
from sharding import mesh as meshes


def divide(
    config: Config, expected: Iterable[StepShape]
) -> tuple[tuple[StepShape, ...], tuple[StepShape, ...]]:
    """Of the steps that come first, those of the chips that decode and those of a worker's.

    Raises:
        InputError: as `sharding.mesh.for_prefill`: before weights are read.
    """
    expected = tuple(expected)
    if not config.prefill.chips:
        return expected, ()
    meshes.for_prefill(config)
    decoding = tuple(shape for shape in expected if shape.decode[0])
    return decoding, tuple(shape for shape in expected if shape not in decoding)


class PrefillWorker:
    """Computes prompts for one engine.

    Attributes:
        scheduler: of the leaders.
        model_runner: on the chips of `Config.prefill`.
        sent_bytes: of pages so far, of all chips.
    """

    def __init__(self, config: Config, receiver: ModelRunner, expected: Iterable[StepShape] = ()):
        """Takes the receiver's weights; raises as `sharding.mesh.for_prefill`."""
        self._receiver = receiver
        receiver.before_admit = self.send
        self._mesh = meshes.for_prefill(config)
        config = config.for_prefill()
        self.scheduler = Scheduler(config, cache_policy.page_costs(config))
        shapes = self.scheduler.shapes
        self.scheduler.shapes = tuple(shape for shape in shapes if not shape.decode[0])
        params = self.params_of(receiver.params)
        self.model_runner = ModelRunner(config, lambda: params, expected, self._mesh)
        self._overlaps = config.engine.scheduling.overlap
        self._steps = StepsInFlight(self.scheduler, self.model_runner)
        self._led: dict[Sequence, Sequence] = {}  # leader -> the sequence that waits for it
        lanes = config.engine.cache.row_multiple or 1
        page_bytes = config.cached_model.page_bytes(config.page_tokens, lanes)
        self._page_bytes = [config.mesh.num_chips * size for size in page_bytes]
        self.sent_bytes = 0

    @property
    def compile_s(self) -> float:
        return self._steps.compile_s

    def params_of(self, params: Params) -> Params:
        """The receiver's weights on these chips, sent from device to device."""
        return meshes.moved(params, self._mesh, linear.specs(self._receiver.config))

    def warm_up(self, progress: Callable[[], None], seals: bool) -> None:
        """As `Engine.warm_up`, and what sends pages."""
        self.model_runner.warm_up(self.scheduler.shapes, progress, seals)
        for runner in (self.model_runner, self._receiver):
            runner.compile_page_copies()

    def add(self, sequence: Sequence) -> None:
        """Begins with the prompt of a sequence that waits to decode; one that has a single token,
        or more than the pages here can hold, is computed where it decodes.
        """
        if len(sequence.tokens) == 1:
            return
        leader = Sequence(
            sequence.id, sequence.params, list(sequence.tokens), len(sequence.tokens),
            sends_pages=True, prefix=Prefix(sequence.prefix.key),
            history=History(sequence.history.arrival_s),
        )  # fmt: skip
        leader.max_length = len(leader.tokens)
        try:
            self.scheduler.add(leader)
        except InputError:
            return
        self._led[leader] = sequence
        sequence.leader = leader

    def launch(self) -> bool:
        """Starts a step where there is one to start, and does not wait."""
        for leader, sequence in list(self._led.items()):
            if sequence.status is Status.FINISHED:  # aborted
                self._finish(leader)
        return len(self._steps) <= self._overlaps and self._steps.launch(is_open=False)

    def commit(self, waits: bool) -> Iterator[tuple[Sequence, FinishReason]]:
        """Commits the steps that are done, and the oldest one even if it `waits` for it. Yields the
        sequences that end with their prompts, which were only read or gave non-finite logits,
        before the next step, which may fail, is fetched.
        """
        yield from self._ended()  # what an interrupt left, or a fault
        while len(self._steps) and (waits or self._steps.is_done):
            waits = False
            step, output = self._steps.fetch()
            self.scheduler.commit(step.schedule, output)
            yield from self._ended()
            self._steps.record(step)

    def _ended(self) -> Iterator[tuple[Sequence, FinishReason]]:
        """Sequences that end with their prompts."""
        commits = self.scheduler.commits
        while commits:
            leader = commits[0].sequence
            if sequence := self._led.get(leader):
                sequence.results.prompt_logprobs = leader.results.prompt_logprobs
                sequence.results.prompt_top_logprobs = leader.results.prompt_top_logprobs
                sequence.results.pooled = leader.results.pooled
                yield sequence, leader.finish_reason or FinishReason.ERROR
                del self._led[leader]
            commits.popleft()

    def send(self, schedule: StepSchedule) -> None:
        """Sends the pages that a step's admissions need; they are free here then."""
        for admission in (a for shard in schedule.shards for a in shard.admissions):
            if admission.sender is not None:
                shard = admission.sequence.shard
                self._receiver.receive(self.model_runner, admission.sent_pages, shard)
                self.sent_bytes += sum(self._page_bytes[g] for g, *_ in admission.sent_pages)
                self._finish(admission.sender)

    def finish_steps(self) -> Iterator[tuple[Sequence, FinishReason]]:
        """Commits all steps in flight; yields what `commit` does."""
        while len(self._steps):
            yield from self.commit(waits=True)

    def start_over(self) -> None:
        """Forgets what is computed and not sent: it is computed again."""
        self._steps.clear()
        for commit in self.scheduler.commits:
            commit.restore()
        committed = {commit.sequence for commit in self.scheduler.commits}
        for leader in list(self._led):
            if leader.status is Status.FINISHED and leader not in committed:
                self._finish(leader)
        self.scheduler.start_over(self._led)

    def _finish(self, leader: Sequence) -> None:
        self.scheduler.finish(leader, FinishReason.ABORT)
        if sequence := self._led.pop(leader, None):
            sequence.leader = None
