"""A plan: memory, latency and throughput of a deployment, a row a batch and context."""

import dataclasses
import functools
import math
from collections.abc import Iterable

from configs import adapters
from configs.errors import InputError, shown
from configs.hardware.spec import HardwareSpec
from configs.mesh import MOST_CHIPS, ONE_CHIP, Mesh
from configs.model import ModelConfig
from configs.settings.adapters import NO_SLOTS, AdapterConfig
from inference.planner import adapter_cost, cost, roofline, weights
from inference.planner.cost import Cost, Operation, Precision, Work
from inference.planner.parallel import collectives
from inference.planner.roofline import Exchange, StepTime
from inference.planner.speculation import Speculation

ACCOUNTINGS = ("exact", "lecture")
MAX_SAMPLES = 4096  # of a request


@dataclasses.dataclass(frozen=True)
class Row:
    """One point. Bytes are of a whole replica, rates of all replicas.

    Attributes:
        batch, context: requests of a replica at the same time, and tokens of each prompt.
        parameters: of the model.
        weight_bytes, cache_bytes, memory_bytes: one copy of the weights, cache of all requests at
            their longest, both with snapshots and slots of adapters; a draft model's included.
        fits: whether each chip holds its part.
        step_s: time of a decode step, at the mean length of the sequences; of proposing and
            verifying, where there are drafts.
        ttft_s: time of the prefill of the whole batch; samples fork before the last prompt token,
            and then take a step.
        output_tok_s: tokens a second while decoding.
        request_s: the prefill, and a step for each token that it does not give; None without new
            tokens.
        intensity: FLOPs a byte of the decode step, both as the accounting counts them.
        bound: what takes longest in a decode step.
        dollars_per_million: of output tokens while decoding; None without a price.
        tpot_s: time per output token of one sequence.
        chip_bytes: what the fullest chip holds.
        snapshot_bytes: copies of states that are kept for prefixes.
    """

    batch: int
    context: int
    parameters: int
    weight_bytes: float
    cache_bytes: float
    memory_bytes: float
    fits: bool
    step_s: float
    ttft_s: float
    output_tok_s: float
    request_s: float | None
    intensity: float
    bound: str
    dollars_per_million: float | None
    tpot_s: float
    chip_bytes: float
    snapshot_bytes: int


@dataclasses.dataclass(frozen=True)
class Deployment:
    """A model on chips. Activations and temporaries are no part of its memory.

    Attributes:
        precision: None stores everything in the model's dtype.
        replicas: copies of the whole mesh, with requests of their own.
        samples: sequences of each request, which share the pages of its prompt and decode together.
        adapters: room for them, which is part of the memory; of times only `adapter_seconds` counts
            any.
        snapshots: of all layers' states, kept for prefixes on the chips of each data-parallel
            group beside those of its sequences; None: as many as it has sequences.
        accounting: 'exact' counts every byte and FLOP; 'lecture' reads all parameters and the whole
            cache once a decode step and takes that for its time; its prefill is two FLOPs a
            parameter and token.

    Raises:
        InputError: the mesh cannot divide the model, or the chips have no links; or a field is out
            of range.
    """

    config: ModelConfig
    hardware: HardwareSpec
    precision: Precision | None = None
    mesh: Mesh = ONE_CHIP
    replicas: int = 1
    speculation: Speculation | None = None
    accounting: str = "exact"
    snapshots: int | None = 0
    samples: int = 1
    adapters: AdapterConfig = NO_SLOTS

    def __post_init__(self) -> None:
        self.mesh.check(self.config)
        if not self.mesh.is_even(self.config):
            raise InputError(
                f"mesh {self.mesh} gives chips unequal parts of {self.config.name}, which is not "
                "planned yet; `scripts.compile` says what they hold"
            )
        if self.accounting not in ACCOUNTINGS:
            raise InputError(
                f"accounting is one of {', '.join(ACCOUNTINGS)}, not {self.accounting!r}"
            )
        if self.replicas < 1:
            raise InputError(f"at least 1 replica, not {self.replicas}")
        if self.replicas > MOST_CHIPS:
            raise InputError(f"at most {MOST_CHIPS} replicas")
        if not 1 <= self.samples <= MAX_SAMPLES:
            raise InputError(f"--samples is from 1 to {MAX_SAMPLES}, not {shown(self.samples)}")
        if self.mesh.group_chips * self.mesh.expert > 1 and not self.hardware.link_bandwidth:
            raise InputError(f"{self.hardware.name} has no links: its mesh is one chip")

    def __str__(self) -> str:
        """Formats, replicas and mesh: 'int4 weights, fp8 cache, 2 x model=4'."""
        weights_name, cache_name = self.formats.weights.name, self.formats.cache.name
        return f"{weights_name} weights, {cache_name} cache, {self.replicas} x {self.mesh}"

    @functools.cached_property
    def formats(self) -> Precision:
        return self.precision or Precision.of(self.config)

    @property
    def drafts(self) -> int:
        """k, drafts a step."""
        return self.speculation.drafts if self.speculation else 0

    @property
    def tokens_per_step(self) -> float:
        """Expected tokens of a sequence's decode step."""
        return self.speculation.tokens_per_step if self.speculation else 1.0

    @property
    def lanes(self) -> int:
        """Multiple that rows of pages are padded to (`HardwareSpec.lanes`)."""
        return self.hardware.lanes(self.formats.cache.name)

    @property
    def _with_draft(self) -> float:
        """Models held, in targets: a draft model is a share of one."""
        return 1 + (self.speculation.size if self.speculation else 0.0)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the figures take for granted though this hardware does not offer it."""
        linked = self.hardware.linked_chips
        if self.mesh.group_chips * self.mesh.expert <= linked:
            return ()
        return (f"links join {linked} chips, this mesh takes all for joined so",)

    # --- memory -----------------------------------------------------------------------------------

    @functools.cached_property
    def weight_bytes(self) -> float:
        """Bytes of one copy of the weights, a draft model's included."""
        return weights.weight_bytes(self.config, self.formats) * self._with_draft

    @functools.cached_property
    def chip_weight_bytes(self) -> float:
        """Bytes of weights that each chip holds."""
        return self._chip_target_bytes * self._with_draft

    @property
    def _chip_target_bytes(self) -> float:
        """The same of the model alone, without what drafts for it."""
        return weights.chip_weight_bytes(self.config, self.formats, self.mesh)

    def cache_bytes(self, length: int) -> float:
        """Bytes of one sequence of `length` tokens, stored once."""
        return self._cached(length, self.drafts, ONE_CHIP) * self._with_draft

    def chip_cache_bytes(self, length: int) -> float:
        """Bytes that one sequence of `length` tokens takes on each chip along `model` and
        `context`: beyond the number of key/value heads, chips along `model` hold copies.
        """
        return self._cached(length, self.drafts, self.mesh) * self._with_draft

    def sent_cache_bytes(self, length: int) -> float:
        """Bytes of one sequence of `length` tokens that a process with this mesh sends to one with
        as many chips along `model`.
        """
        return self._with_draft * cost.sent_cache_bytes(
            self.config, length, self.formats, self.drafts, self.lanes, self.mesh.model
        )

    def _on_chip(self, length: int) -> float:
        """The same of the model alone, without drafts."""
        return self._cached(length, 0, self.mesh)

    def _cached(self, length: int, drafts: int, mesh: Mesh) -> float:
        return cost.cache_bytes(
            self.config, length, self.formats, drafts, self.lanes, mesh.model, mesh.context
        )

    def request_bytes(self, context: int, new_tokens: int) -> float:
        """Bytes of one request at its longest, stored once: what its samples see of the prompt, and
        the tokens and states of each.
        """
        more_samples = (self.samples - 1) * self.cache_bytes(new_tokens)
        return self.cache_bytes(context + new_tokens) + more_samples

    def _chip_request_bytes(self, context: int, new_tokens: int) -> float:
        """The same on each chip along `model`."""
        more_samples = (self.samples - 1) * self.chip_cache_bytes(new_tokens)
        return self.chip_cache_bytes(context + new_tokens) + more_samples

    @property
    def memory_room(self) -> float:
        """Bytes that weights and adapters leave on each chip for the cache; negative where they do
        not fit.
        """
        return self.hardware.memory_bytes - self.chip_weight_bytes - self.adapter_bytes

    @functools.cached_property
    def adapter_bytes(self) -> int:
        """Bytes of the slots of adapters on each chip."""
        if not self.adapters.slots:
            return 0
        return adapters.num_bytes(self._chip_model, self.adapters)

    @property
    def _chip_model(self) -> ModelConfig:
        mesh = self.mesh
        return self.config.per_chip(mesh.model, mesh.expert, mesh.context)

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of one snapshot, stored once."""
        return self.config.state_bytes

    @property
    def _chip_snapshot_bytes(self) -> float:
        """Bytes that one snapshot takes on each chip along `model`."""
        return self._on_chip(0)

    def num_snapshots(self, batch: int) -> int:
        """Snapshots of one data-parallel group of a replica of `batch` requests."""
        if self.snapshots is None:
            return self._on_fullest(batch) * self.samples
        return self.snapshots

    def largest_batch(self, context: int, new_tokens: int = 0) -> int:
        """Requests a replica holds at their longest; 0 where not even the weights fit."""
        per_request, room = self._chip_request_bytes(context, new_tokens), self.memory_room
        if self.snapshots is None:
            per_request += self.samples * self._chip_snapshot_bytes
        else:
            room -= self.snapshots * self._chip_snapshot_bytes
        return self.mesh.num_groups * max(0, math.floor(room / per_request))

    def _on_fullest(self, batch: int) -> int:
        """Requests of the chips that have most of them."""
        return math.ceil(batch / self.mesh.num_groups)

    # --- time -------------------------------------------------------------------------------------

    def decode_operations(self, batch: int, context: int) -> tuple[Operation, ...]:
        """Operations of a decode step of one data-parallel group."""
        return cost.step_operations(self.config, self.decode_work(batch, context), self.formats)

    def decode_time(self, batch: int, context: int) -> StepTime:
        """Time of one decode step of a replica's requests; where there are drafts it verifies
        them, what proposes them comes on top.
        """
        if self.accounting == "lecture":
            step_time = self._lecture_time(self._num_fed(batch), batch, context)
            return dataclasses.replace(step_time, total_s=step_time.memory_s)
        return self._exact_time(self.decode_work(batch, context))

    def prefill_time(self, batch: int, context: int) -> StepTime:
        """Time of prefilling `batch` prompts at once."""
        if self.accounting == "lecture":
            return self._lecture_time(batch * context, 0, context)
        return self._exact_time(self.prefill_work(batch, context))

    def prompt_seconds(self, batch: int, context: int) -> float:
        """Time of prefilling `batch` prompts; samples fork before the last token, if they can."""
        length = max(1, context - (self.samples > 1))
        return self.prefill_time(batch, length).total_s

    def decoded_tokens(self, new_tokens: int) -> int:
        """New tokens of a sequence that decode steps give: the prefill gives the first where
        there is one sample.
        """
        return max(0, new_tokens - (self.samples == 1))

    def mean_length(self, context: int, new_tokens: int) -> int:
        """Tokens that a sequence has in its middle decode step."""
        return context + max(0, new_tokens - (self.samples > 1)) // 2

    def request_seconds(self, batch: int, context: int, new_tokens: int) -> float:
        """Time of `batch` requests that start and end together: the prefill, and a step for each
        token that it does not give.
        """
        step_s = self.step_seconds(batch, self.mean_length(context, new_tokens))
        steps = self.decoded_tokens(new_tokens) / self.tokens_per_step
        return self.prompt_seconds(batch, context) + steps * step_s

    def step_seconds(self, batch: int, context: int) -> float:
        """Time of one decode step: proposing, verifying."""
        verify = self.decode_time(batch, context).total_s
        if not self.speculation:
            return verify
        plain = dataclasses.replace(self, speculation=None)
        return verify + self.drafts * self.speculation.cost * (
            plain.decode_time(batch, context).total_s
        )

    def adapter_seconds(self, work: Work, num_adapters: int) -> float:
        """Time that a step takes longer where its tokens have so many different adapters."""
        added = adapter_cost.operations(
            self._chip_model, self.adapters, work.num_tokens, num_adapters, self.formats
        )
        step_time = roofline.step_time(added, self.hardware, self.formats)
        return step_time.total_s - step_time.overhead_s

    def decode_work(self, batch: int, context: int) -> Work:
        """A decode step of one data-parallel group."""
        requests = math.ceil(batch / self.mesh.data)
        return Work.decode(requests, context, self.drafts, self.samples)

    def _num_fed(self, batch: int) -> int:
        """Tokens that all sequences of `batch` requests feed in a decode step."""
        return batch * self.samples * (1 + self.drafts)

    def prefill_work(self, batch: int, context: int) -> Work:
        """A prefill of one data-parallel group."""
        return Work.prefill(math.ceil(batch / self.mesh.data), context)

    def exchanges(self, work: Work) -> tuple[Exchange, ...]:
        """What the chips of a data-parallel group exchange in a step of greedy requests, where
        they have links.
        """
        if not self.hardware.link_bandwidth:
            return ()
        return tuple(
            roofline.exchange(collective, work, self.hardware, self.mesh)
            for collective in collectives.of_step(
                self.config, self.mesh, stored=self.formats.rest.name
            )
        )

    def collective_seconds(self, work: Work) -> float:
        """Seconds of the exchange in a step that hides behind nothing."""
        return sum(e.seconds for e in self.exchanges(work) if e.collective.exposed)

    def step_time(self, operations: Iterable[Operation], collective_s: float = 0.0) -> StepTime:
        """Time of these operations of one data-parallel group on its chips, and of exchange."""
        return roofline.step_time(operations, self.hardware, self.formats, self.mesh, collective_s)

    def _exact_time(self, work: Work) -> StepTime:
        operations = cost.step_operations(self.config, work, self.formats)
        return self.step_time(operations, self.collective_seconds(work))

    def _intensity(self, batch: int, context: int) -> float:
        """FLOPs a byte of a decode step."""
        if self.accounting == "lecture":
            done = self._lecture_cost(self._num_fed(batch), batch, context)
        else:
            done = cost.total(self.decode_operations(batch, context))
        return done.flops / done.bytes

    def _lecture_time(self, num_tokens: int, num_read: int, context: int) -> StepTime:
        """The longer of reading and computing what the lecture counts."""
        done = self._lecture_cost(num_tokens, num_read, context)
        memory = done.bytes / self.hardware.read_bandwidth
        compute = done.flops / self.hardware.rate(self.formats.weights.compute)
        return StepTime(memory, compute, 0.0, 0.0, max(memory, compute))

    def _lecture_cost(self, num_tokens: int, num_read: int, context: int) -> Cost:
        """Each chip's weights and the caches of `num_read` requests' sequences once; two FLOPs a
        parameter and token.
        """
        sequences = self._on_fullest(num_read) * self.samples
        read = self._chip_target_bytes + sequences * self._on_chip(context)
        flops = 2 * num_tokens * weights.num_active_parameters(self.config) / self.mesh.num_chips
        return Cost(read, flops)

    # --- both -------------------------------------------------------------------------------------

    def row(self, batch: int, context: int, new_tokens: int = 0) -> Row:
        """The point of `batch` prompts of `context` tokens, each sample of which grows by
        `new_tokens`.

        Raises:
            InputError: a size is out of range.
        """
        self.check_lengths(batch, context, new_tokens)
        middle, weight_bytes = self.mean_length(context, new_tokens), self.weight_bytes
        cached = batch * self.request_bytes(context, new_tokens)
        on_chip = self._on_fullest(batch) * self._chip_request_bytes(context, new_tokens)
        num_snapshots = self.num_snapshots(batch)
        on_chip += num_snapshots * self._chip_snapshot_bytes
        snapshots = self.mesh.num_groups * num_snapshots * self.snapshot_bytes
        step_s = self.step_seconds(batch, middle)
        ttft_s = self.prompt_seconds(batch, context) + (self.samples > 1) * step_s
        tpot_s = step_s / self.tokens_per_step
        rate = self.replicas * batch * self.samples / tpot_s
        price = self.hardware.price_per_hour
        hourly = None if price is None else price * self.mesh.num_chips * self.replicas
        return Row(
            batch, context, weights.num_parameters(self.config), weight_bytes, cached,
            weight_bytes + cached + snapshots + self.adapter_bytes,
            on_chip <= self.memory_room, step_s, ttft_s, rate,
            self.request_seconds(batch, context, new_tokens) if new_tokens else None,
            self._intensity(batch, middle), self.decode_time(batch, middle).bound,
            None if hourly is None else hourly / 3600 / rate * 1e6, tpot_s,
            self.chip_weight_bytes + self.adapter_bytes + on_chip, snapshots,
        )  # fmt: skip

    def check_lengths(self, batch: int, context: int, new_tokens: int = 0) -> None:
        """Whether these are sizes that the model can have.

        Raises:
            InputError: one is below its least, or together they exceed the model's context.
        """
        for name, value, least in (("batch", batch, 1), ("context", context, 1),
                                   ("new_tokens", new_tokens, 0)):  # fmt: skip
            if value < least:
                raise InputError(f"{name} is at least {least}, not {value}")
        if context + new_tokens > self.config.max_context:
            raise InputError(
                f"context and new_tokens are at most the {self.config.max_context} tokens of "
                f"{self.config.name} together, not {context + new_tokens} "
                "(--set model.max_context=... asks what if)"
            )
