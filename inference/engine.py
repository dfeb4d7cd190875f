"""The engine: requests in, tokens out. The loop is schedule, build, run, commit.

It knows nothing of flags, files or HTTP, and of text only that a tokenizer turns it into ids and
back.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Set
from collections.abc import Sequence as Items
from pathlib import Path

from configs import overrides
from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.settings.section import paths
from inference import new_weights
from inference.adapters.table import tell_hosts
from inference.checkpoints import classifiers, flax_tree, resolve, weight_formats
from inference.checkpoints.checkpoint import Checkpoint
from inference.checkpoints.load import Progress
from inference.device_memory import DeviceMemory
from inference.input_processor import InputProcessor
from inference.new_weights import NewWeights, ParamsVersions
from inference.open_requests import OpenRequests
from inference.outputs import RequestOutput
from inference.planner import cache_policy
from inference.prefill import places, worker
from inference.prefill.prefiller import Figures
from inference.prompt_runner import PromptRunner
from inference.request import SamplingParams
from inference.request_batch import Prompt
from inference.request_state import RequestState
from inference.runtime.model_runner import ModelRunner, for_this_device
from inference.runtime.steps_in_flight import StepsInFlight
from inference.scheduling.adaptive_drafts import AdaptiveDrafts
from inference.scheduling.scheduler import Scheduler
from inference.scheduling.sequence import FinishReason, Sequence, SequenceFault
from inference.scheduling.step_shapes import StepShape
from inference.text.end_tokens import EndTokens
from inference.text.tokenizer import MissingTokenizer, Tokenizer
from layers.params import Params
from sharding import hosts


class Engine(PromptRunner):
    """Runs many requests through one step at a time. Not thread-safe: one thread drives the
    device.
    """

    def __init__(
        self,
        config: Config,
        params: Params | Callable[[], Params],
        tokenizer: Tokenizer | None = None,
        eos_ids: Iterable[int] = (),
        why_no_text: str = "this engine has no tokenizer",
        expected: Iterable[StepShape] = (),
        executables: Path | None = None,
    ):
        """`params`, `expected` and `executables` as `ModelRunner` takes them; `eos_ids` end each
        sequence whose request reads them; `why_no_text` begins errors where no tokenizer is there.
        """
        expected, prompts = worker.divide(config, expected)
        self.model_runner = ModelRunner(config, params, expected, executables=executables)
        self.config = config = self.model_runner.config
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids if isinstance(eos_ids, Set) else frozenset(eos_ids)
        self.input_processor = InputProcessor(config, tokenizer, self.eos_ids, why_no_text)
        self.adapters = self.input_processor.adapters
        self.adapters.before_change = tell_hosts
        self.scheduler = Scheduler(config, *cache_policy.of_caches(config))
        if config.engine.drafts.adapt_drafts:
            self.scheduler.draft_policy = AdaptiveDrafts(config.engine)
        self._prefill = places.prefiller(config, self.model_runner, self.scheduler, prompts)
        self._memory = DeviceMemory(self.model_runner, self._prefill)
        self._steps = StepsInFlight(self.scheduler, self.model_runner)
        self.records = self._steps.records
        self._requests = OpenRequests(self.scheduler, tokenizer)
        self._is_whole = True  # no call was interrupted
        self._versions = ParamsVersions()
        self._declared = config.model  # as a checkpoint says; `config` may have been changed

    @property
    def compile_s(self) -> float:
        """Seconds spent compiling so far; no step's time includes it."""
        return self._steps.compile_s + (self._prefill.compile_s if self._prefill else 0.0)

    @property
    def weight_version(self) -> int:
        """Version of the weights; 0 at first."""
        return self._versions.current

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished, or outputs wait for `step`."""
        return bool(self.scheduler.has_work or self.scheduler.commits or self._requests.unread)

    @property
    def is_compiling(self) -> bool:
        """Whether a step is being compiled; any thread may ask."""
        runners = [self.model_runner, *(self._prefill.runners if self._prefill else ())]
        return any(runner.executables.is_compiling for runner in runners)

    @property
    def prefill_figures(self) -> Figures:
        return self._prefill.figures if self._prefill else Figures()

    @classmethod
    def from_model(
        cls,
        model: str,
        *,
        progress: Progress | None = None,
        executables: Path | None = None,
        **settings: object,
    ) -> "Engine":
        """An engine for a preset, a directory, a `.gguf` file or a hub id:
        `Engine.from_model("smollm2-135m", max_seqs=8, dtype="float32")`.

        Args:
            settings: of `EngineConfig` and its groups by name, and `dtype` and `cache_format` of
                the model.

        Raises:
            InputError: the model or a setting is not valid.
        """
        places = {name: f"model.{name}" for name in ("dtype", "cache_format")}
        places |= paths(EngineConfig)
        for name in settings:
            if name not in places:
                raise InputError(f"unknown setting {name!r}; valid: {', '.join(places)}")
        resolved = resolve.resolve(model)
        changes = [f"{places[name]}={value}" for name, value in settings.items()]
        config = overrides.apply(Config(resolved.config), changes)
        return cls.from_checkpoint(config, resolved.open(progress), progress, (), executables)

    @classmethod
    def from_checkpoint(
        cls,
        config: Config,
        checkpoint: Checkpoint,
        progress: Progress | None = None,
        expected: Iterable[StepShape] = (),
        executables: Path | None = None,
        draft: Checkpoint | None = None,
    ) -> "Engine":
        """An engine for an opened checkpoint; without a tokenizer it serves token ids. `config` may
        differ in how it runs, `expected` is compiled while weights are read, `draft` drafts.

        Raises:
            InputError: this device cannot run it so.
        """
        requested = config.engine.kernels.linear
        config, _ = for_this_device(config)
        config, checkpoint = weight_formats.choose(config, checkpoint, requested)
        weight_formats.warn_of_rounding(config)
        tokenizer, why_no_text = None, ""
        try:
            tokenizer = checkpoint.load_tokenizer()
        except MissingTokenizer as error:
            why_no_text = str(error)
        if draft is not None and tokenizer is not None:
            tokenizer.check_same(draft.load_tokenizer())
        classifier = classifiers.of_checkpoint(
            checkpoint, tokenizer, config.engine.requests.classifier_tokens
        )
        read = new_weights.reader(config, checkpoint, progress, draft)
        ends = EndTokens(tokenizer, checkpoint.eos_ids)  # found while weights are read
        engine = cls(config, read, tokenizer, ends, why_no_text, expected, executables)
        engine._declared, engine.classifier = checkpoint.config, classifier
        if engine._prefill:
            engine._prefill.connect(checkpoint)
        return engine

    def add_request(self, prompt: Prompt, params: SamplingParams, output: Items[int] = ()) -> int:
        """Queues a prompt, of whose one answer `output` is known; returns the request's id.

        Raises:
            InputError: it is empty or too long, or asks for what this engine was not built for.
        """
        self._check_ready()
        tokens = self.input_processor.encode(prompt)
        hosts.current().tell("add_request", tokens, dataclasses.asdict(params), [*output])
        sequences = self.input_processor.sequences(tokens, params, output)
        request = self._requests.add(sequences)
        if self._prefill:
            self._prefill.add(sequences[0])
        return request.group.id

    def fork(self, id: int, params: SamplingParams) -> int:
        """A second continuation of a running request, sharing its pages; returns the new id.

        Raises:
            InputError: there is no such request, it has several answers or is to have them, or
                nothing is left to generate.
        """
        self._check_ready()
        hosts.current().tell("fork", id, dataclasses.asdict(params))
        parent = self._requests.parent(id, params)
        child = self.input_processor.continuation(parent, params)
        return self._requests.fork(parent, child).group.id

    def retain(
        self, tokens: Items[int], cache_salt: str | None = None, adapter: str | None = None
    ) -> None:
        """Lets what is cached of a conversation outlive other prefixes until it goes on.

        For one that waits, such as for the result of a tool call. How long depends on the price of
        computing it again (`planner/cache_policy.py`). `tokens` are its prompt and its answer,
        `cache_salt` and `adapter` those of the requests.
        """
        hosts.current().tell("retain", [*tokens], cache_salt, adapter)
        self.scheduler.retain(tuple(tokens), cache_salt, self.adapters.get(adapter))

    def abort(self, id: int) -> None:
        """Ends a request wherever it is; an unknown id has no effect."""
        if id not in self._requests:
            return
        hosts.current().tell("abort", id)
        request = self._requests[id]
        try:
            request.finish(FinishReason.ABORT)
        except SequenceFault:  # or what an interrupt left half done
            self.rebuild()
            request.finish(FinishReason.ABORT)
        self._requests.remove(request)
        if self._prefill:
            self._prefill.finish_aborted()

    def step(self, is_open: bool = False) -> list[RequestOutput]:
        """Starts a step for every request that can run, and returns the outputs of the oldest one
        in flight: with `overlap` that is the one before it, which the device runs while the next is
        scheduled. A step whose executable is not compiled yet starts in the next call.

        What `generate`, `stream`, `score` and `embed` have queued is served too, but read there;
        they keep the outputs of other requests for the next call of this.

        Args:
            is_open: more requests will come, which a policy of whole batches may wait for.
        """
        self.run_step(is_open)
        return self._requests.take_outputs()

    def run_step(self, is_open: bool = False) -> None:
        """As `step`; outputs wait where they are read. A fault in a sequence ends that one, and an
        interrupt loses nothing: what runs is computed again.
        """
        self._check_ready()
        hosts.current().tell("step", is_open)
        self._is_whole = is_fetched = False
        self._steps.note_done()
        try:
            if self._prefill and self._steps.waiting is None:  # which may need pages from there
                self._prefill.launch()
            is_launched = self._steps.launch(is_open)
            is_due = len(self._steps) > (is_launched and self.config.engine.scheduling.overlap)
            if self._prefill:
                self._end(self._prefill.commit(waits=not (is_launched or is_due)))
            is_fetched = is_due
            self._process(is_due)
        except SequenceFault as fault:
            self._steps.note_success(is_fetched)  # of the device
            self._fail(fault)
        except BaseException as error:
            if isinstance(error, Exception):
                hosts.current().await_loss()
            self.rebuild()  # the cache is donated, the schedule's admissions are spent
            if not self._steps.is_passing(error):
                raise
        else:
            self._steps.note_success(is_fetched)
        self._steps.look_away()
        self._is_whole = True

    def slack_s(self) -> float:
        """Seconds for which `step` need not be called: requests that come may start in the next."""
        can_start = any(shard.free_slots for shard in self.scheduler.shards)
        return self._steps.slack_s() if can_start and self._prefill is None else 0.0

    def rebuild(self) -> None:
        """Starts over with an empty cache: running requests are computed again from the host's
        tokens.

        Raises:
            InputError: the engine sleeps.
        """
        self._check_awake()
        hosts.current().tell("rebuild")
        self._forget_pages()
        self._memory.empty_pages()
        self._is_whole = True

    def update_params(
        self,
        source: Params | str | Path | NewWeights,
        keeps_pages: bool = False,
        progress: Progress | None = None,
        version: int | None = None,
    ) -> int:
        """Goes on with other weights of the same names, shapes and dtypes; returns their version,
        which outputs name. It happens between two steps: the tokens of steps in flight are the
        last of the old ones. The new lie beside them until then (without room for both: `sleep`,
        then `wake` with the new); whatever fails, the old ones serve on.

        Args:
            source: a tree of parameters on whatever devices, which is copied, from one mesh to
                another without the host; a tree of Flax's (docs/flax.md); what `--model` takes; the
                directory of a step that Orbax wrote of either; or what `read_weights` returned.
            keeps_pages: what is cached stays, though old weights computed it, and later prompts
                find it; else all of it is computed again.
            version: of the new weights; None: the next.

        Raises:
            InputError: the weights are not those of this model, the version is not above the last,
                or the engine sleeps.
        """
        self._check_awake()
        self._versions.check(version)
        new = self._read(source, "update_params", progress)
        self._finish_steps()
        if not keeps_pages:
            self.rebuild()  # first: where it fails, the old ones are still there
        self._memory.set_params(new.params)
        self.classifier = new.classifier
        self._versions.advance(keeps_pages, self._requests.sequences, version)
        return self._versions.current

    def read_weights(self, source: str | Path) -> NewWeights:
        """Reads what `update_params` and `wake` take; any thread may, beside steps.

        Raises:
            InputError: they are not those of this model, or not finite.
        """
        return self._read(source, "update_params")

    def export_params(self, like: object = None) -> Params:
        """Returns new arrays of the target's parameters as it declares them, for a trainer or Orbax
        on the same mesh, and `update_params`: no copy goes through the host.

        Args:
            like: a tree of Flax's, of arrays or shapes, that is returned, through the host.

        Raises:
            InputError: weights have few bits, the tree is another model's, there are several hosts,
                or the engine sleeps.
        """
        self._check_awake()
        hosts.current().check_alone("export_params")
        tree = self.model_runner.export_params()
        return tree if like is None else flax_tree.export(self.config.model, tree, like)

    def sleep(self, keeps_weights: bool = True, keeps_pages: bool = False) -> None:
        """Frees the device's memory, all but what is compiled. Requests stay: their tokens are on
        the host. New ones are refused until `wake`.

        Args:
            keeps_weights: weights move to the host's memory; else they are dropped, and `wake` has
                to be given some.
            keeps_pages: pages, states and slots move to the host's memory; else what is cached is
                dropped, and running requests are computed again.

        Raises:
            InputError: the engine sleeps already, or weights that are dropped cannot come back.
        """
        self._check_awake()
        hosts.current().check_alone("sleep")
        if self._prefill and not keeps_weights:
            self._prefill.check_params_stay("sleep without weights")
        self._finish_steps()
        if not keeps_pages:
            self._forget_pages()
        self._memory.free(keeps_weights, keeps_pages)

    def wake(
        self, source: Params | str | Path | NewWeights | None = None, version: int | None = None
    ) -> None:
        """Goes on where `sleep` left off.

        Args:
            source: new weights, as `update_params` takes them, which have a version of their own
                and do what it does with pages that `sleep` kept: they stay. None: those that were
                kept.
            version: of new weights; None: the next.

        Raises:
            InputError: the engine does not sleep, no weights were kept, or the new ones are not
                those of this model; then it sleeps on.
        """
        if not self._memory.is_free:
            raise InputError("the engine does not sleep: there is nothing to wake")
        self._versions.check(version)
        new = None if source is None else self._read(source, "wake with other weights")
        has_pages = self._memory.restore(None if new is None else new.params)
        if new is not None:
            self.classifier = new.classifier
            self._versions.advance(has_pages, self._requests.sequences, version)

    def _read(
        self,
        source: Params | str | Path | NewWeights,
        what: str,
        progress: Progress | None = None,
    ) -> NewWeights:
        """Reads new weights for a change of this name, which is refused where they have to stay."""
        if isinstance(source, NewWeights):
            return source
        hosts.current().check_alone(what)
        if self._prefill:
            self._prefill.check_params_stay(what)
        has_head = self.classifier is not None
        return new_weights.read(
            source, self.config, self._declared, self.tokenizer, has_head, progress
        )

    def _check_ready(self) -> None:
        """Does again what an interrupt has left half done."""
        self._check_awake()
        if not self._is_whole:
            self.rebuild()

    def _check_awake(self) -> None:
        if self._memory.is_free:
            raise InputError("the engine sleeps: wake() it first")

    def _finish_steps(self) -> None:
        try:
            if self._prefill:
                self._end(self._prefill.finish_steps())
            while len(self._steps):
                self._process(is_due=True)
            self._process(is_due=False)
        except SequenceFault as fault:
            self._fail(fault)
        except BaseException:
            self.rebuild()
            raise

    def _fail(self, fault: SequenceFault) -> None:
        """Ends the sequence that a fault lies in; the others go on from their tokens."""
        self.rebuild()
        if self._prefill and fault.sequence.sends_pages:
            self._prefill.fail(fault)
        else:
            self.scheduler.fail(fault)

    def _forget_pages(self) -> None:
        """All that was computed is to be computed again."""
        self._steps.clear()
        self._requests.start_over()
        if self._prefill:
            self._prefill.start_over()
        self.scheduler.start_over(self._requests.sequences)
        self._versions.forget_pages()

    def warm_up(self, progress: Callable[[], None] = lambda: None, seals: bool = True) -> None:
        """Compiles every shape; from then on a compilation is an error, or (`seals` is False) it is
        counted in `model_runner.num_late_compiles`.
        """
        self._check_awake()
        hosts.current().tell("warm_up", seals)
        if self._prefill:
            self._prefill.warm_up(progress, seals)
        self.model_runner.warm_up(self.scheduler.shapes, progress, seals)

    def queue(
        self, prompt: Prompt, params: SamplingParams, unread: deque[RequestOutput]
    ) -> RequestState:
        """As `add_request`; outputs are read in `unread`, and `step` does not return them."""
        request = self._requests[self.add_request(prompt, params)]
        request.unread = unread
        return request

    def is_open(self, request: RequestState) -> bool:
        return request.group.id in self._requests

    def _process(self, is_due: bool) -> None:
        """Commits the oldest step in flight, if that is due, launches the one that waited for it,
        and makes outputs of what was committed.
        """
        step = None
        if is_due:
            step, output = self._steps.fetch()
            for _, chunk in step.schedule.rows:
                if chunk.emits or chunk.sequence.is_only_read:
                    has_read = (
                        chunk.sequence.prefix.num_cached_tokens > 0 or self._prefill is not None
                    )
                    self._versions.note(chunk.sequence, has_read)
            self.scheduler.commit(step.schedule, output)
            self._steps.launch_waiting()
        self._requests.process()
        if step is not None:
            self._steps.record(step)

    def _end(self, ended: Iterable[tuple[Sequence, FinishReason]]) -> None:
        """Ends sequences that need no decoding."""
        for sequence, reason in ended:
            self._versions.note(sequence, has_read_pages=True)
            self.scheduler.end(sequence, reason)
