"""Prompts computed on chips of their own, whose pages then move to the chips that decode.

The worker has a scheduler, pages and steps of its own. So decoding, with all that sampling means,
is as everywhere, and a decoding step waits for no prompt.

Prefixes are cached on both sides. A sequence that is preempted while it decodes is computed again,
or its pages swapped in, where it decodes.
"""

from collections.abc import Callable, Iterable

import jax

from configs.engine import Config
from configs.errors import InputError
from inference.planner import cache_policy
from inference.prefill.leaders import Leaders
from inference.prefill.prefiller import Ended, Prefiller
from inference.runtime.model_runner import ModelRunner
from inference.scheduling.scheduler import Scheduler
from inference.scheduling.sequence import FinishReason, Sequence, SequenceFault, Status
from inference.scheduling.step_shapes import StepShape
from layers.kernels.linear import api as linear
from layers.params import Params
from sharding import mesh as meshes


def divide(
    config: Config, expected: Iterable[StepShape]
) -> tuple[tuple[StepShape, ...], tuple[StepShape, ...]]:
    """Of the steps that come first, those of the chips that decode and those of a worker's.

    Raises:
        InputError: as `sharding.mesh.for_prefill`, or `prefill.hosts` is set on one of several
            hosts that decode: before weights are read.
    """
    if config.prefill.hosts is not None and jax.process_count() > 1:
        raise InputError(
            f"prefill.hosts={config.prefill.hosts}: goes with one host that decodes; leave it out, "
            "or the other hosts"
        )
    expected = tuple(expected)
    if not config.prefill.chips:
        return expected, ()
    meshes.for_prefill(config)
    decoding = tuple(shape for shape in expected if shape.decode[0])
    return decoding, tuple(shape for shape in expected if shape not in decoding)


class PrefillWorker(Prefiller):
    """Computes prompts for one engine, on the chips of `Config.prefill`."""

    def __init__(self, config: Config, receiver: ModelRunner, expected: Iterable[StepShape] = ()):
        """Takes the receiver's weights; raises as `sharding.mesh.for_prefill`."""
        lanes = config.engine.cache.row_multiple or 1
        page_bytes = config.cached_model.page_bytes(config.page_tokens, lanes)
        super().__init__(receiver, [config.mesh.model * size for size in page_bytes])
        self._mesh = meshes.for_prefill(config)
        config = config.for_prefill()
        scheduler = Scheduler(config, cache_policy.page_costs(config))
        params = self.params_of(receiver.params)
        runner = ModelRunner(config, lambda: params, expected, self._mesh)
        self._leaders = Leaders(scheduler, runner)

    @property
    def scheduler(self) -> Scheduler:
        """Of the leaders."""
        return self._leaders.scheduler

    @property
    def model_runner(self) -> ModelRunner:
        return self._leaders.model_runner

    @property
    def runners(self) -> list[ModelRunner]:
        return [self.model_runner]

    @property
    def compile_s(self) -> float:
        return self._leaders.compile_s

    def params_of(self, params: Params) -> Params:
        """The receiver's weights on these chips, sent from device to device."""
        return meshes.moved(params, self._mesh, linear.specs(self._receiver.config))

    def warm_up(self, progress: Callable[[], None], seals: bool) -> None:
        """As `Engine.warm_up`, and what sends pages."""
        self.model_runner.warm_up(self.scheduler.shapes, progress, seals)
        self.model_runner.compile_page_copies()
        super().warm_up(progress, seals)

    def add(self, sequence: Sequence) -> None:
        """Begins with the prompt of a sequence that waits to decode; one that has a single token,
        or more than the pages here can hold, is computed where it decodes.
        """
        if len(sequence.tokens) == 1:
            return
        leader = self._lead(sequence)
        try:
            self.scheduler.add(leader)
        except InputError:
            super()._finish(leader)

    def launch(self) -> None:
        """Starts a step where there is one to start, and does not wait."""
        self.finish_aborted()
        self._leaders.launch()

    def commit(self, waits: bool) -> Ended:
        """Commits the steps that are done, and the oldest one even if it `waits` for it. Yields the
        sequences that end with their prompts, as `Leaders.commit` does.
        """
        for leader in self._leaders.commit(waits):
            if sequence := self._led.get(leader):
                sequence.results.prompt_logprobs = leader.results.prompt_logprobs
                sequence.results.prompt_top_logprobs = leader.results.prompt_top_logprobs
                sequence.results.pooled = leader.results.pooled
                yield sequence, leader.finish_reason or FinishReason.ERROR
                del self._led[leader]

    def finish_steps(self) -> Ended:
        """Commits all steps in flight; yields what `commit` does."""
        while len(self._leaders):
            yield from self.commit(waits=True)

    def start_over(self) -> None:
        """Forgets what is computed and not sent: it is computed again."""
        committed = self._leaders.clear()
        for leader in list(self._led):
            if leader.status is Status.FINISHED and leader not in committed:
                self._finish(leader)
        self._leaders.start_over(self._led)

    def fail(self, fault: SequenceFault) -> None:
        self.scheduler.fail(fault)

    def _send(self, leader: Sequence, pages: tuple[tuple[int, int, int], ...], shard: int) -> None:
        """Sends pages from device to device; they are free here then."""
        self._receiver.receive(self.model_runner, pages, shard)

    def _finish(self, leader: Sequence) -> None:
        self.scheduler.finish(leader, FinishReason.ABORT)
        super()._finish(leader)
