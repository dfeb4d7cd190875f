"""An iteration of reinforcement learning before it runs: an engine samples groups of answers, a
trainer learns from them. Seconds and bytes of both, and which of them waits for the other.

Answers are taken to be as long as they may be. Training is counted in FLOPs, as if it reached a
share of the chip's rate that is an assumption (`Training.mfu`), unlike the steps of the engine.
"""

import dataclasses
import math

from configs import adapters
from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.latent import Latent
from configs.model import ModelConfig
from configs.precision import FORMATS
from configs.recipes.policy import Iteration
from configs.settings.adapters import AdapterConfig
from inference.planner import cost, roofline, weights
from inference.planner.cost import Precision, Rows, Work
from inference.planner.deployment import Deployment

MFU = 0.4  # what large models are trained at on chips of today; nothing here is measured
_FLOAT32 = 4  # bytes
_MOMENTS = 2  # of AdamW, each like the parameters
# Of a parameter an update reads and writes the master, the moments and the sum of its gradients.
_UPDATE_BYTES = 2 * (2 + _MOMENTS) * _FLOAT32
# Float32 copies that the backward pass needs, by compiled steps of small models: of what products
# read and write, and of attention's scores.
_KEPT_ACTIVATIONS, _KEPT_SCORES = 4 / 3, 2.5


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on the fullest chip.

    Attributes:
        state_bytes: of the trainer at all times: float32 masters and moments; with an adapter also
            the model below it; the model at the start, if it is another one.
        work_bytes: of the trainer in an update: gradients, weights in the model's type, and
            activations, which are an estimate.
        engine_bytes: of the engine at all times: its weights.
        cache_bytes: of the sequences that it runs at a time, at their longest.
        chip_bytes: what there is.
    """

    state_bytes: float
    work_bytes: float
    engine_bytes: float
    cache_bytes: float
    chip_bytes: float

    @property
    def sampling_bytes(self) -> float:
        return self.engine_bytes + self.cache_bytes

    @property
    def training_bytes(self) -> float:
        return self.state_bytes + self.work_bytes

    @property
    def sharing(self) -> str:
        """How both use the same chips: 'together'; 'in turns', where the cache and an update's
        arrays have one place; 'by the host', where the trainer's state waits in its memory, too; or
        'not', where even one alone is too large.
        """
        if self.sampling_bytes + self.training_bytes <= self.chip_bytes:
            return "together"
        if max(self.sampling_bytes, self.training_bytes) > self.chip_bytes:
            return "not"
        in_turns = max(self.state_bytes + self.sampling_bytes, self.training_bytes)
        return "in turns" if in_turns <= self.chip_bytes else "by the host"


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When the two run.

    Attributes:
        name: 'same chips', or 'apart' with as many chips for each: 'synchronous' or 'asynchronous'.
        num_chips: of both.
        step_s: of an iteration, where many follow each other.
        samples_s: answers a second.
        sampling_idle, training_idle: share of a step that the engine's and the trainer's chips
            wait: for the other, or for what moves.
    """

    name: str
    num_chips: int
    step_s: float
    samples_s: float
    sampling_idle: float
    training_idle: float


@dataclasses.dataclass(frozen=True)
class Training:
    """The trainer's part of an iteration on all chips.

    Attributes:
        passes: forward passes that it takes as long as: 3 with the gradients of weights, 2 without,
            and one more each for recomputed activations and for the model at the start.
        flops: of a chip, in all passes.
        mfu: share of the chip's rate that they are taken to reach: an assumption.
        compute_s, update_s: the passes; reading and writing parameters, moments and gradients.
    """

    passes: int
    flops: float
    mfu: float
    compute_s: float
    update_s: float

    @property
    def seconds(self) -> float:
        return self.compute_s + self.update_s


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The engine's part of an iteration.

    Attributes:
        prompts: of a replica at a time.
        waves: of these, one after the other.
        prefill_s, decode_s: each prompt once for its group; a token of all answers a step.
    """

    prompts: int
    waves: int
    prefill_s: float
    decode_s: float

    @property
    def seconds(self) -> float:
        return self.prefill_s + self.decode_s


@dataclasses.dataclass(frozen=True)
class Plan:
    """An iteration.

    Attributes:
        sharing: of chips, as `Memory.sharing`.
        move_s: of moving the trainer's state to the host and back, where chips are shared so.
        sampling_share: of chips that are apart, those that sample where neither waits.
    """

    iteration: Iteration
    prompt_tokens: int
    sampling: Sampling
    training: Training
    memory: Memory
    sharing: str
    move_s: float
    schedules: tuple[Schedule, ...]
    sampling_share: float


def plan(
    deployment: Deployment,
    iteration: Iteration,
    prompt_tokens: int,
    recompute: bool = False,
    mfu: float = MFU,
) -> Plan:
    """The cost of an iteration whose engine is a deployment, and whose trainer has its chips or as
    many others.

    Args:
        prompt_tokens: of each prompt.
        recompute: each layer's activations are computed again on the way back, instead of kept.
        mfu: share of a chip's rate that training reaches.

    Raises:
        InputError: a size is out of range, or the mesh divides cached tokens, of which training has
            none.
    """
    deployment.check_lengths(iteration.batch, prompt_tokens, iteration.max_new_tokens)
    if deployment.mesh.context > 1:
        raise InputError(
            f"mesh.context={deployment.mesh.context}: divides cached tokens, and training caches "
            "none; leave mesh.context=1"
        )
    if not 0 < mfu <= 1:
        raise InputError(f"--mfu={mfu}: must be above 0 and at most 1")
    engine = dataclasses.replace(deployment, samples=iteration.group_size)
    sampling = _sampling(engine, iteration, prompt_tokens)
    training = _training(engine, iteration, prompt_tokens, recompute, mfu)
    memory = _memory(engine, iteration, prompt_tokens, recompute, sampling.prompts)
    bandwidth = deployment.hardware.host_bandwidth
    move_s = 0.0
    if memory.sharing == "by the host" and bandwidth is not None:
        move_s = 2 * memory.state_bytes / bandwidth
    return Plan(
        iteration, prompt_tokens, sampling, training, memory, memory.sharing, move_s,
        _schedules(engine, iteration, sampling.seconds, training.seconds, move_s),
        sampling.seconds / (sampling.seconds + training.seconds),
    )  # fmt: skip


def _sampling(engine: Deployment, iteration: Iteration, prompt_tokens: int) -> Sampling:
    """As many prompts at a time as fit, in waves of equal answers."""
    new_tokens = iteration.max_new_tokens
    prompts = math.ceil(iteration.batch / engine.replicas)
    at_a_time = max(1, min(prompts, engine.largest_batch(prompt_tokens, new_tokens)))
    waves = math.ceil(prompts / at_a_time)
    prefill_s = decode_s = 0.0
    for size in (at_a_time,) * (waves - 1) + (prompts - (waves - 1) * at_a_time,):
        prefill = engine.prompt_seconds(size, prompt_tokens)
        prefill_s += prefill
        decode_s += engine.request_seconds(size, prompt_tokens, new_tokens) - prefill
    return Sampling(at_a_time, waves, prefill_s, decode_s)


def _training(
    engine: Deployment, iteration: Iteration, prompt_tokens: int, recompute: bool, mfu: float
) -> Training:
    sequences = math.ceil(iteration.num_answers / (engine.replicas * engine.mesh.data))
    work, formats = _forward(sequences, prompt_tokens, iteration), Precision.of(engine.config)
    forward = sum(
        roofline.per_chip(operation, engine.mesh).flops
        for operation in cost.step_operations(engine.config, work, formats)
    )
    passes = (2 if iteration.lora_rank else 3) + recompute + (iteration.kl_coefficient > 0)
    chip, flops = engine.hardware, passes * forward
    moved = iteration.updates * _UPDATE_BYTES * _num_trained(engine, iteration)
    return Training(
        passes, flops, mfu, flops / (chip.rate(formats.weights.compute) * mfu),
        moved / (chip.read_bandwidth * chip.bandwidth_share),
    )  # fmt: skip


def _forward(sequences: int, prompt_tokens: int, iteration: Iteration) -> Work:
    """A pass over answers, each behind its prompt; the last token of one is no input."""
    length = prompt_tokens + iteration.max_new_tokens - 1
    rows = Rows(sequences, length, length)
    return Work(sequences * length, (rows,), sequences * iteration.max_new_tokens)


def _num_trained(engine: Deployment, iteration: Iteration) -> float:
    """Trained parameters of a chip."""
    if iteration.lora_rank:
        room = AdapterConfig(1, iteration.lora_rank)
        padding = adapters.padded_rank(room) / iteration.lora_rank
        return adapters.num_elements(_chip_model(engine), room) / padding
    return _weight_bytes(engine, "float32") / _FLOAT32


def _chip_model(engine: Deployment) -> ModelConfig:
    return engine.config.per_chip(engine.mesh.model, engine.mesh.expert)


def _weight_bytes(engine: Deployment, dtype: str) -> float:
    """Bytes of all weights in one type on a chip."""
    plain = dataclasses.replace(engine.config, formats=(), dtype=dtype)
    return weights.chip_weight_bytes(plain, Precision.of(plain), engine.mesh)


def _memory(
    engine: Deployment, iteration: Iteration, prompt_tokens: int, recompute: bool, prompts: int
) -> Memory:
    trained = _num_trained(engine, iteration) * _FLOAT32
    model_bytes = _weight_bytes(engine, engine.config.dtype)
    state, gradients = (1 + _MOMENTS) * trained, trained * (2 if iteration.accumulate > 1 else 1)
    copies = 0.0
    if iteration.lora_rank:
        state += weights.chip_weight_bytes(
            engine.config, Precision.of(engine.config), engine.mesh
        )  # which is the model at the start, too
    else:
        state += model_bytes * (iteration.kl_coefficient > 0)
        copies = model_bytes * (engine.config.dtype != "float32")
    cached = engine.row(prompts, prompt_tokens, iteration.max_new_tokens).chip_bytes
    return Memory(
        state, gradients + copies + _activations(engine, iteration, prompt_tokens, recompute),
        engine.chip_weight_bytes, cached - engine.chip_weight_bytes, engine.hardware.memory_bytes,
    )  # fmt: skip


def _activations(
    engine: Deployment, iteration: Iteration, prompt_tokens: int, recompute: bool
) -> float:
    """Bytes of what the backward pass of a part of an update needs on a chip, about."""
    groups = engine.replicas * engine.mesh.num_groups
    parts = groups * iteration.updates * iteration.accumulate
    sequences = math.ceil(iteration.num_answers / parts)
    work = _forward(sequences, prompt_tokens, iteration)
    plain, float32 = dataclasses.replace(engine.config, formats=()), FORMATS["float32"]
    formats = Precision(float32, Precision.of(plain).cache, float32)
    moved = sum(
        roofline.per_chip(operation, dataclasses.replace(engine.mesh, expert=1)).activation_bytes
        for operation in cost.step_operations(plain, work, formats)
        if operation.name != "head"  # whose logits are computed again, a block at a time
    )
    length = prompt_tokens + iteration.max_new_tokens - 1
    num_heads = sum(
        part.num_heads
        for layer in _chip_model(engine).layers
        for part in layer.mixer.parts
        if isinstance(part, Attention | Latent)
    )
    scores = _FLOAT32 * sequences * length**2 * num_heads
    stored = _KEPT_ACTIVATIONS * moved + _KEPT_SCORES * scores
    if not recompute:
        return stored
    residual = _FLOAT32 * work.num_tokens * engine.config.width * engine.config.num_layers
    return residual + stored / engine.config.num_layers


def _schedules(
    engine: Deployment,
    iteration: Iteration,
    sampling_s: float,
    training_s: float,
    move_s: float,
) -> tuple[Schedule, ...]:
    chips = engine.replicas * engine.mesh.num_chips
    one_by_one, overlapped = sampling_s + training_s, max(sampling_s, training_s)

    def schedule(name: str, num_chips: int, step_s: float, is_shared: bool = False) -> Schedule:
        busy = (one_by_one, one_by_one) if is_shared else (sampling_s, training_s)
        idle = (1 - seconds / step_s for seconds in busy)
        return Schedule(name, num_chips, step_s, iteration.num_answers / step_s, *idle)

    return (
        schedule("same chips", chips, one_by_one + move_s, True),
        schedule("apart, synchronous", 2 * chips, one_by_one),
        schedule(f"apart, asynchronous by {max(1, iteration.staleness)}", 2 * chips, overlapped),
    )
