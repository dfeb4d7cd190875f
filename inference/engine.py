"""The engine: requests in, tokens out. The loop is schedule, build, run, commit.

It knows nothing of flags, files or HTTP, and of text only that a tokenizer turns it into ids and
back.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from configs import overrides
from configs.engine import Config, EngineConfig
from configs.errors import InputError
from inference import request
from inference.checkpoints import resolve
from inference.checkpoints.load import Progress
from inference.checkpoints.opened import Checkpoint
from inference.input_processor import Intake
from inference.outputs import Completion, Score, StepRecord, Update, alternatives
from inference.planner import swap_policy
from inference.request import FinishReason, SamplingParams, Status
from inference.runtime.batch import Inputs, build
from inference.runtime.model_runner import Executor, for_this_device
from inference.scheduling.scheduler import Scheduler
from inference.scheduling.sequence_group import Answers, Beams, Samples
from inference.scheduling.step_schedule import Plan
from inference.text.detokenizer import Detokenizer
from inference.text.tokenizer import Tokenizer
from layers import decoder
from layers.mixer import Mixer
from layers.params import Params

_MAX_FAILED_STEPS = 2  # in a row: then the failure is not a passing one


@dataclasses.dataclass
class _Flight:
    """A step, from its planning until its results are taken in."""

    plan: Plan
    inputs: Inputs
    host_s: float
    output: Any = None  # once the device has it
    began: float = 0.0
    done: float | None = None  # where that was seen before its results were taken in


class Engine:
    """Runs many requests through one step at a time. Not thread-safe: one thread drives the
    device.
    """

    def __init__(
        self,
        config: Config,
        params: Params,
        tokenizer: Tokenizer | None = None,
        eos_ids: Iterable[int] = (),
        mixers: Mapping[str, Mixer] = decoder.MIXERS,
    ):
        """`eos_ids` end every sequence whose request does not ignore them."""
        self.executor = Executor(config, params, mixers)
        self.config = config = self.executor.config
        self.tokenizer = tokenizer
        self.eos_ids = frozenset(eos_ids)
        self._intake = Intake(config, tokenizer, self.eos_ids)
        self.scheduler = Scheduler(config, swap_policy.spills(config))
        self._flights: deque[_Flight] = deque()
        self._held: _Flight | None = None  # planned; its program is not there yet
        self._idle_since = 0.0  # when the newest step was done
        self._left_at = 0.0  # when `step` last returned
        self.records: deque[StepRecord] = deque(maxlen=4096)
        self._answers: dict[int, Answers] = {}  # by the ids of their sequences
        self._sequences: dict[int, request.Sequence] = {}
        self._detokenizers: dict[int, Detokenizer] = {}
        self._unread: dict[int, deque[Update]] = {}  # of requests that are streamed
        self._num_failed_steps = 0
        self.compile_s = 0.0  # so far; no step's time includes it

    @classmethod
    def from_model(
        cls, model: str, *, progress: Progress | None = None, **settings: Any
    ) -> "Engine":
        """An engine for a preset, a directory, a `.gguf` file or a hub id:
        `Engine.from_model("smollm2-135m", max_seqs=8, dtype="float32")`.

        Args:
            model: as `--model` takes it.
            progress: told of downloads and conversions.
            settings: fields of `EngineConfig`, and `dtype` of the model.

        Raises:
            InputError: the model or a setting is not valid.
        """
        names = [field.name for field in dataclasses.fields(EngineConfig)]
        for name in settings:
            if name not in (*names, "dtype"):
                raise InputError(f"unknown setting {name!r}; valid: dtype, {', '.join(names)}")
        resolved = resolve.resolve(model)
        config = overrides.apply(
            Config(resolved.config),
            [
                f"{'model' if name == 'dtype' else 'engine'}.{name}={value}"
                for name, value in settings.items()
            ],
        )
        return cls.from_checkpoint(config, resolved.open(progress), progress)

    @classmethod
    def from_checkpoint(
        cls, config: Config, checkpoint: Checkpoint, progress: Progress | None = None
    ) -> "Engine":
        """An engine for an opened checkpoint; `config` may differ from its own in how it runs.

        Raises:
            InputError: this device cannot run it so.
        """
        config = for_this_device(config)
        params = checkpoint.load_params(decoder.param_infos(config.model), progress)
        return cls(config, params, checkpoint.load_tokenizer(), checkpoint.eos_ids)

    def add_request(self, prompt: str | Sequence[int], params: SamplingParams) -> int:
        """Queues a prompt (text or token ids) and returns the request's id.

        Raises:
            InputError: the prompt is empty or too long, or asks for what this engine was not built
                for.
        """
        sequences = self._intake.sequences(self._intake.encode(prompt), params)
        for sequence in sequences:
            self.scheduler.add(sequence)
        answers: Answers = Samples(sequences)
        if params.beam_width:
            limit = self.config.max_context
            answers = Beams(self.scheduler, sequences[0], limit, self._text_of)
        self._register(answers)
        return answers.id

    def fork(self, id: int, params: SamplingParams) -> int:
        """A second continuation of a running request, sharing its pages; returns the new id.

        Raises:
            InputError: there is no such request, it has several answers or is to have them, or
                nothing is left to generate.
        """
        parent = self._sequences.get(id)
        if parent is None or parent.scores:
            raise InputError(f"request {id} is not generating: there is nothing to fork")
        if any(asked.beam_width or asked.num_samples > 1 for asked in (parent.params, params)):
            raise InputError("a fork and what it is forked from have one answer each: leave n=1")
        if params.max_new_tokens <= parent.num_output_tokens:
            raise InputError(
                f"request {id} has generated {parent.num_output_tokens} tokens: a fork's "
                f"max_new_tokens is more, not {params.max_new_tokens}"
            )
        child = self._intake.sequence(list(parent.tokens), parent.num_prompt_tokens, params)
        child.logprobs, child.top_logprobs = list(parent.logprobs), list(parent.top_logprobs)
        self.scheduler.fork(parent, child)
        self._register(Samples([child]))
        if self.tokenizer:
            self._detokenizers[child.id].push(child.output_tokens)
        return child.id

    def abort(self, id: int) -> None:
        """Ends a request wherever it is; an unknown id has no effect."""
        if answers := self._answers.get(id):
            for sequence in answers.sequences:
                self.scheduler.finish(sequence, FinishReason.ABORT)
            self._retire(answers)

    def step(self, is_open: bool = False) -> list[Update]:
        """Starts a step for every request that can run, and returns the news of the oldest one in
        flight: with `engine.overlap` that is the one before it, which the device runs while the
        next is planned. A step whose program is not compiled yet starts in the next call.

        Args:
            is_open: more requests will come, which a policy of whole batches may wait for.
        """
        for flight in self._flights:  # done while the caller was busy, which is no step's time
            if flight.done is None and self.executor.is_done(flight.output):
                flight.done = max(flight.began, self._left_at)
        try:
            is_under_way = self._launch(is_open)
            has_news = len(self._flights) > (is_under_way and self.config.engine.overlap)
            news = self._land() if has_news else []
        except BaseException as error:
            self.rebuild()  # the cache is donated, the plan's admissions are spent
            self._num_failed_steps += 1
            is_passing = self._num_failed_steps < _MAX_FAILED_STEPS
            if isinstance(error, jax.errors.JaxRuntimeError) and is_passing:
                return []
            self._num_failed_steps = 0
            raise
        if has_news and self._held is None:  # a program that is not there may fail to compile
            self._num_failed_steps = 0
        self._left_at = time.perf_counter()
        return news

    def rebuild(self) -> None:
        """Starts over with an empty cache: running requests are computed again from the host's
        tokens.
        """
        self._flights.clear()
        self._held = None
        self.scheduler.start_over()
        self.executor.reset()

    def update_params(self, params: Params) -> None:
        """Goes on with other weights of the same shapes: what is cached is computed again.

        Raises:
            InputError: the parameters are not those of this model.
        """

        def kinds(tree: Params) -> Any:
            return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)

        if kinds(params) != kinds(self.executor.params):
            raise InputError("update_params takes parameters of the model that the engine runs")
        self.executor.params = params
        self.rebuild()

    def warm_up(self, progress: Callable[[], None] = lambda: None, seals: bool = True) -> None:
        """Compiles every shape; from then on a compilation is an error, or (`seals` is False) it is
        counted in `executor.num_late_compiles`.
        """
        self.executor.warm_up(self.scheduler.shapes, progress, seals)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        on_update: Callable[[Update], None] = lambda update: None,
    ) -> list[Completion]:
        """Continues every prompt and returns the completions in the order of the prompts.

        Raises:
            InputError: as `add_request`; then nothing was queued.
        """
        found = dict(self.as_completed(prompts, params, on_update))
        return [found[index] for index in range(len(prompts))]

    def as_completed(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        on_update: Callable[[Update], None] = lambda update: None,
    ) -> Iterator[tuple[int, Completion]]:
        """Continues every prompt and yields (index of the prompt, completion) as each ends; leaving
        the loop early aborts the others.

        Raises:
            InputError: as `add_request`; then nothing was queued.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise InputError(f"{len(prompts)} prompts do not go with {len(each)} SamplingParams")
        with self._requests(prompts, each) as requests:
            open_ = {answers.id: index for index, answers in enumerate(requests)}
            while open_:
                ended = [id for id in open_ if id not in self._answers]
                for index in [open_.pop(id) for id in ended]:
                    yield index, requests[index].completion()
                for update in self._deliver() if open_ and not ended else ():
                    if update.id in open_:
                        on_update(update)

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams = SamplingParams()
    ) -> Iterator[Update]:
        """Continues one prompt, yielding its news; leaving the loop early aborts it. Several
        streams may be read in turn.
        """
        with self._requests([prompt], [params]) as (answers,):
            unread = self._unread[answers.id] = deque()
            try:
                while answers.id in self._answers or unread:
                    if not unread:
                        self._deliver()
                    while unread:
                        yield unread.popleft()
            finally:
                del self._unread[answers.id]

    def score(self, texts: Sequence[str | Sequence[int]]) -> list[Score]:
        """Log-probability of every token of each text, computed in blocks: never all logits at
        once.

        Raises:
            InputError: as `add_request`, or the model gave non-finite logits.
        """
        params = [SamplingParams(max_new_tokens=0)] * len(texts)
        with self._requests(texts, params) as requests:
            while any(answers.id in self._answers for answers in requests):
                self._deliver()
        sequences = [answers.sequences[0] for answers in requests]
        for index, sequence in enumerate(sequences):
            if sequence.finish_reason is FinishReason.ERROR:
                raise InputError(f"the model gave non-finite logits for text {index}")
        return [
            Score(list(s.tokens), s.prompt_logprobs, alternatives(s.prompt_top_logprobs))
            for s in sequences
        ]

    def _deliver(self) -> list[Update]:
        """One step; its news, which streams that are read later find as well."""
        updates = self.step()
        for update in updates:
            if update.id in self._unread:
                self._unread[update.id].append(update)
        return updates

    @contextmanager
    def _requests(
        self, prompts: Sequence[str | Sequence[int]], params: Sequence[SamplingParams]
    ) -> Iterator[list[Answers]]:
        """Queues all of them or none; none outlives the block."""
        if isinstance(prompts, str):
            raise InputError("one text is given where a list of them is expected")
        ids: list[int] = []
        try:
            for prompt, own in zip(prompts, params, strict=True):
                ids.append(self.add_request(prompt, own))
            yield [self._answers[id] for id in ids]
        finally:
            for id in ids:
                self.abort(id)

    def _launch(self, is_open: bool) -> bool:
        """Plans a step and gives it to the device; False where there is nothing to do, or where the
        news of the step in flight need not wait for a program.
        """
        flight, self._held = self._held, None
        if flight is None or not _serves_anybody(flight.plan):
            flight = self._plan(is_open)
        if flight is None:
            return False
        if not self.executor.is_ready(flight.plan):
            if self._flights:
                self._held = flight
                return False
            self._compile(flight.plan)
        flight.began = time.perf_counter()
        flight.output = self.executor.launch(flight.plan, flight.inputs)
        self._flights.append(flight)
        return True

    def _plan(self, is_open: bool) -> _Flight | None:
        start = time.perf_counter()
        plan = self.scheduler.schedule(start, is_open)
        if plan is None:
            return None
        inputs = build(plan, self.config)
        return _Flight(plan, inputs, time.perf_counter() - start)

    def _land(self) -> list[Update]:
        """Waits for the oldest step in flight and takes its results in."""
        flight = self._flights[0]
        output = self.executor.wait(flight.output)
        landed = time.perf_counter()
        done = flight.done or landed
        del self._flights[0]
        news: list[Update] = []
        for sequence, tokens in self.scheduler.commit(flight.plan, output):
            news += self._take(sequence, tokens)
        seconds = done - max(flight.began, self._idle_since)
        plan = flight.plan
        rows = tuple((row.length, row.start + row.length) for row in (*plan.decode, *plan.tiles))
        host_s = flight.host_s + time.perf_counter() - landed
        self.records.append(StepRecord(plan.shape, rows, seconds, host_s))
        self._idle_since = done
        if not self.scheduler.has_work:  # a step in flight serves nobody any more
            self._flights.clear()
        return news

    def _compile(self, plan: Plan) -> None:
        """Compiles what the plan needs; no step's time includes it."""
        start = time.perf_counter()
        self.executor.prepare(plan)
        self.compile_s += time.perf_counter() - start

    def _register(self, answers: Answers) -> None:
        self._answers |= dict.fromkeys(answers.ids, answers)
        for sequence in answers.sequences:
            self._sequences[sequence.id] = sequence
            if self.tokenizer is not None:
                stop, min_tokens = sequence.params.stop, sequence.params.min_tokens
                self._detokenizers[sequence.id] = Detokenizer(self.tokenizer, stop, min_tokens)

    def _retire(self, answers: Answers) -> None:
        for id in answers.ids:
            for known in (self._answers, self._sequences, self._detokenizers):
                known.pop(id, None)

    def _take(self, sequence: request.Sequence, tokens: list[int]) -> list[Update]:
        """News of a sequence as the news of its request."""
        answers = self._answers.get(sequence.id)
        if answers is None:  # ended by what another of its sequences brought
            return []
        news = answers.take(self._update(sequence, tokens))
        if answers.is_finished:
            self._retire(answers)
        return news

    def _update(self, sequence: request.Sequence, tokens: list[int]) -> Update:
        """Turns new tokens into text; a stop string ends the sequence here, where text is known."""
        text, detokenizer = "", self._detokenizers.get(sequence.id)
        if detokenizer is not None:
            ended = bool(tokens) and sequence.is_end(tokens[-1])
            text = detokenizer.push(tokens[:-1] if ended else tokens)
            if detokenizer.stopped is not None:
                self.scheduler.finish(sequence, FinishReason.STOP)
                sequence.finish_reason = FinishReason.STOP
            elif sequence.status is Status.FINISHED:
                text += detokenizer.flush()
        reason = sequence.finish_reason
        return Update(sequence.id, tokens, text, reason.value if reason else None)

    def _text_of(self, sequence: request.Sequence) -> str:
        """Text of a finished sequence that was not followed as it grew."""
        if self.tokenizer is None:
            return ""
        tokens, detokenizer = sequence.output_tokens, Detokenizer(self.tokenizer)
        ended = bool(tokens) and sequence.is_end(tokens[-1])
        return detokenizer.push(tokens[:-1] if ended else tokens) + detokenizer.flush()


def _serves_anybody(plan: Plan) -> bool:
    """Whether a plan still has to run: for a sequence, or for pages that the books say it moves."""
    sequences = [row.sequence for row in (*plan.decode, *plan.tiles)]
    sequences += [admission.sequence for admission in plan.admissions]
    return bool(plan.transfers) or any(s.status is not Status.FINISHED for s in sequences)
