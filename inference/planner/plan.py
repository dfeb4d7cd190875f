"""A plan: memory, latency and throughput of a deployment, a row a batch and context."""

import dataclasses
import math

from configs.errors import InputError
from configs.hardware.spec import HardwareSpec
from configs.mesh import ONE_CHIP, Mesh
from configs.model import ModelConfig
from inference.planner import cost, roofline, weights
from inference.planner.cost import Operation, Precision, Work
from inference.planner.roofline import StepTime
from inference.planner.speculation import Speculation

ACCOUNTINGS = ("exact", "lecture")


@dataclasses.dataclass(frozen=True)
class Row:
    """One point. Bytes are of a whole replica, rates of all replicas.

    Attributes:
        batch, context: sequences at the same time, and tokens of each prompt.
        parameters: of the model.
        weight_bytes, cache_bytes, memory_bytes: weights, cache of all sequences at their longest,
            both.
        fits: whether each chip holds its part.
        step_s: time of a decode step, at the mean length of the sequences.
        ttft_s: time of the prefill of the whole batch.
        output_tok_s: tokens a second while decoding.
        request_s: prefill and all new tokens; None without new tokens.
        intensity: FLOPs a byte of the decode step.
        bound: what takes longest in a decode step.
        dollars_per_million: of output tokens while decoding; None without a price.
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


@dataclasses.dataclass(frozen=True)
class Deployment:
    """A model on chips.

    Attributes:
        precision: None stores everything in the model's dtype.
        replicas: copies of the whole mesh, with requests of their own.
        accounting: 'exact' counts every byte and FLOP; 'lecture' reads all parameters and the whole
            cache once a step, and takes reading alone for its time.
    """

    config: ModelConfig
    hardware: HardwareSpec
    precision: Precision | None = None
    mesh: Mesh = ONE_CHIP
    replicas: int = 1
    speculation: Speculation | None = None
    accounting: str = "exact"

    def __post_init__(self) -> None:
        self.mesh.check(self.config)
        if self.accounting not in ACCOUNTINGS:
            raise InputError(
                f"accounting is one of {', '.join(ACCOUNTINGS)}, not {self.accounting!r}"
            )
        if self.replicas < 1:
            raise InputError(f"at least 1 replica, not {self.replicas}")

    @property
    def formats(self) -> Precision:
        """The precision in effect."""
        return self.precision or Precision.of(self.config)

    @property
    def drafts(self) -> int:
        """k, drafts a step."""
        return self.speculation.drafts if self.speculation else 0

    @property
    def weight_bytes(self) -> float:
        """Bytes of one copy of the weights."""
        return weights.weight_bytes(self.config, self.formats.weights, self.formats.rest)

    def cache_bytes(self, length: int) -> float:
        """Bytes of one sequence of `length` tokens."""
        return cost.cache_bytes(self.config, length, self.formats, self.drafts)

    @property
    def memory_room(self) -> float:
        """Bytes of a replica that weights leave for the cache; negative where they do not fit."""
        copies = self.mesh.data  # each group holds the weights
        return self.hardware.memory_bytes * self.mesh.num_chips - copies * self.weight_bytes

    def largest_batch(self, context: int, new_tokens: int = 0) -> int:
        """Sequences a replica holds at their longest."""
        per_sequence = self.cache_bytes(context + new_tokens) * self._cache_copies
        return max(0, math.floor(self.memory_room / per_sequence)) if per_sequence else 0

    @property
    def _cache_copies(self) -> float:
        """Chips beyond the key/value heads hold copies of them."""
        splits = [layer for layer in self.config.layers if not layer.latent and not layer.recurrent]
        limit = self.config.num_kv_heads if splits else self.mesh.model
        return max(1.0, self.mesh.model / limit)

    def decode_operations(self, batch: int, context: int) -> tuple[Operation, ...]:
        """Operations of a decode step of one data-parallel group."""
        work = Work.decode(math.ceil(batch / self.mesh.data), context, self.drafts)
        return cost.step_operations(self.config, work, self.formats)

    def prefill_operations(self, batch: int, context: int) -> tuple[Operation, ...]:
        """Operations of a prefill of one data-parallel group."""
        work = Work.prefill(math.ceil(batch / self.mesh.data), context)
        return cost.step_operations(self.config, work, self.formats)

    def decode_time(self, batch: int, context: int) -> StepTime:
        """Time of one decode step of a replica."""
        if self.accounting == "lecture":
            read = self.weight_bytes + batch * self.cache_bytes(context)
            return self._lecture_time(read, batch * (1 + self.drafts))
        work = Work.decode(math.ceil(batch / self.mesh.data), context, self.drafts)
        return self._exact_time(work)

    def prefill_time(self, batch: int, context: int) -> StepTime:
        """Time of prefilling `batch` prompts at once."""
        if self.accounting == "lecture":
            return self._lecture_time(self.weight_bytes, batch * context)
        return self._exact_time(Work.prefill(math.ceil(batch / self.mesh.data), context))

    def _exact_time(self, work: Work) -> StepTime:
        operations = cost.step_operations(self.config, work, self.formats)
        shape = (self.config, work, self.formats, self.hardware, self.mesh)
        exchanged = roofline.collective_seconds(*shape)
        return roofline.step_time(operations, self.hardware, self.formats, self.mesh, exchanged)

    def _lecture_time(self, read: float, num_tokens: int) -> StepTime:
        """Two FLOPs a parameter and token; whichever of memory and arithmetic takes longer."""
        chips = self.mesh.num_chips
        flops = 2 * num_tokens * weights.num_active_parameters(self.config)
        rate = self.hardware.rate(self.formats.weights.compute)
        memory, compute = read / self.hardware.read_bandwidth / chips, flops / rate / chips
        return StepTime(memory, compute, 0.0, 0.0, max(memory, compute))

    def row(self, batch: int, context: int, new_tokens: int = 0) -> Row:
        """The point of `batch` prompts of `context` tokens that grow by `new_tokens`.

        Raises:
            InputError: a size is out of range.
        """
        for name, value, least in (("batch", batch, 1), ("context", context, 1),
                                   ("new_tokens", new_tokens, 0)):  # fmt: skip
            if value < least:
                raise InputError(f"{name} is at least {least}, not {value}")
        if context + new_tokens > self.config.max_context:
            raise InputError(
                f"context and new_tokens are at most the {self.config.max_context} tokens of "
                f"{self.config.name} together, not {context + new_tokens}"
            )
        held, cached = self.weight_bytes, batch * self.cache_bytes(context + new_tokens)
        decode = self.decode_time(batch, context + new_tokens // 2)
        prefill = self.prefill_time(batch, context)
        step_s = decode.total_s
        per_step = 1.0
        if self.speculation:
            per_step = self.speculation.tokens_per_step
            step_s += self.drafts * self.speculation.cost * step_s / self._verified(batch, context)
        rate = self.replicas * batch * per_step / step_s
        price = self.hardware.price_per_hour
        hourly = None if price is None else price * self.mesh.num_chips * self.replicas
        done = cost.total(self.decode_operations(batch, context + new_tokens // 2))
        return Row(
            batch, context, weights.num_parameters(self.config), held, cached, held + cached,
            cached * self._cache_copies <= self.memory_room, step_s, prefill.total_s, rate,
            prefill.total_s + new_tokens * step_s / per_step if new_tokens else None,
            done.flops / done.bytes, decode.bound,
            None if hourly is None else hourly / 3600 / rate * 1e6,
        )  # fmt: skip

    def _verified(self, batch: int, context: int) -> float:
        """A step that verifies drafts, in plain decode steps: what a draft's cost is counted in."""
        plain = dataclasses.replace(self, speculation=None)
        verifying, decoding = self.decode_time(batch, context), plain.decode_time(batch, context)
        return verifying.total_s / decoding.total_s
