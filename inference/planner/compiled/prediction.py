"""What an engine's steps take of a chip's memory, before they are compiled; loads no JAX."""

import dataclasses
import math

from configs import adapters
from configs.engine import Config
from configs.hardware import catalog
from configs.hardware.targets import Target
from configs.kinds import params
from configs.kinds.experts import Experts, blocks
from configs.kinds.params import ParamInfo
from configs.model import ModelConfig
from configs.precision import FORMATS
from inference.planner import weights
from inference.planner.calibration import measure
from inference.planner.parallel import collectives
from inference.scheduling.step_shapes import StepShape

_FLOAT32 = 4  # bytes
_LOGITS = 4  # arrays of them, at most at the same time
_SUMMED_ROWS = 4  # of a tile on a TPU, which scatters no sums of so few
_PASSES = 15  # of a search for what is drawn from: each keeps a mask of all logits, of a byte; on
# a mesh masked logits, which parts so narrow keep instead of summing them as they come
_DRAWN_LOGITS = 5 + _PASSES  # on a mesh
_RESIDUALS = 2  # before a layer and within
_STREAMS = 4  # on a mesh: the residual stream before a layer and within, what both parts' sums add

# A TPU's compiler fetches matrices into its vector memory ahead of their products, in slices, if
# they take no more than a third of it. Each slice has two tables of addresses, and a layer has some
# more for results that are tuples; each takes 16 KiB of the large memory, none of it is used again,
# and the compiler's statistics count them twice (docs/log.md).
_FETCHED_BYTES, _SLICE_BYTES = (128 << 20) // 3, 4 << 20
_TABLE_BYTES, _LAYER_TABLES = 2 * (16 << 10), 8


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Bytes on each device.

    Attributes:
        weight_bytes, cache_bytes: what is there all the time; slots of adapters are among the
            former, sinks and states among the latter.
        temporary_bytes: what a step needs beside it, the largest of the steps.
        memory_bytes: of the device.
    """

    weight_bytes: int
    cache_bytes: int
    temporary_bytes: int
    memory_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes + self.temporary_bytes

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.memory_bytes


def predict(config: Config, target: Target, shapes: tuple[StepShape, ...]) -> Prediction:
    """What the planner says of an engine with steps of these shapes on each device of a target.

    Args:
        config: for the target's platform (`Config.for_platform`).
    """
    weight_bytes = weights.weight_bytes(config.chip_model)
    for _, info in params.leaves(config.chip_model.parameters()):
        on_device = params.device_format(info, target.platform)
        weight_bytes += info.elements * (_bytes_each(on_device) - _bytes_each(info.format))
    weight_bytes += adapters.num_bytes(config.chip_model, config.engine.adapters)
    tables = _table_bytes(config.chip_model) if target.platform == "tpu" else 0
    needed = tables + max((temporary_bytes(config, shape) for shape in shapes), default=0)
    memory = memory_bytes(target) // (config.mesh.num_chips if target.is_here else 1)
    return Prediction(round(weight_bytes), config.pool_bytes, needed, memory)


def exchanged(
    config: Config, target: Target, shape: StepShape, several_hosts: bool = False
) -> dict[str, tuple[int, int]] | None:
    """(count, bytes) of a chip's collectives by kind, in a step of a shape. None where the program
    branches or repeats them: a CPU's that draws, and those that score. A CPU's compiler sums no
    bfloat16, and a TPU's sums a few rows of all chips on each of them instead of scattering the
    sums. On several hosts each of them gets the outputs of all data shards.
    """
    if shape.scored or (target.platform == "cpu" and not shape.greedy):
        return None
    num_tops = config.engine.requests.top_logprobs
    summed = "float32" if target.platform == "cpu" else ""
    exchanges = collectives.of_step(
        config.model, config.mesh, shape.greedy, num_tops, summed=summed
    )
    if target.platform == "tpu" and shape.num_tokens <= _SUMMED_ROWS:
        summed_kinds = {"reduce-scatter": "all-reduce"}
        exchanges = tuple(
            dataclasses.replace(exchange, kind=summed_kinds.get(exchange.kind, exchange.kind))
            for exchange in exchanges
        )
    total = collectives.totals(exchanges, shape.num_tokens, shape.num_logits)
    if several_hosts and (groups := config.mesh.num_groups) > 1:
        count, num_bytes = total.get("all-reduce", (0, 0))
        width = shape.decode[1]
        has_drafts = width > 1 and shape.decode[0] > 0
        row = 2 + has_drafts + width * (2 + 2 * num_tops)  # words (`StepOutput`)
        total["all-reduce"] = count + 1, num_bytes + 4 * groups * shape.num_rows * row
    return total


def _bytes_each(format: str) -> float:
    return FORMATS[format].bytes_for(1, 1)


def memory_bytes(target: Target) -> int:
    """Bytes of memory of each device of a target."""
    if target.is_here:
        return int(measure.this_memory())
    return int(catalog.get(target.chip).memory_bytes / target.devices_a_chip)


def temporary_bytes(config: Config, shape: StepShape) -> int:
    """Bytes of activations that a step of a shape needs at once: the widest product of all its
    tokens, as its float32 sums and as what is stored of them, or four float32 arrays of logits (as
    they are, filtered, ranked, with noise) and the masks of drawing, whichever is more. On a mesh
    products are narrow, and what is whole on each chip may be more: the residual stream and the
    sums of chips that it gets; and drawing keeps more arrays of the chip's part of the logits. A
    mixture may need most, for the tokens of all chips along `expert`, once for each expert that
    they visit; of experts in few bits beside the residual stream.
    """
    model = config.chip_model
    matrices = [
        info.shape for _, info in params.leaves(model.parameters()["layers"]) if info.is_matrix
    ]
    stored = FORMATS[model.dtype].bytes_for(1, 1)
    sums = max(shape[-2] for shape in matrices) * (_FLOAT32 + stored)
    if config.mesh.group_chips > 1:
        inner = max(shape[-1] for shape in matrices if shape[-2] == model.width)
        sums = max(sums, _STREAMS * model.width * _FLOAT32 + inner * stored)
    sums = max(sums, config.mesh.expert * _expert_bytes(model))
    logit_bytes = _FLOAT32 * _LOGITS
    if not shape.greedy:
        is_divided = config.mesh.group_chips > 1
        logit_bytes = _FLOAT32 * _DRAWN_LOGITS if is_divided else logit_bytes + _PASSES
    logits = shape.num_logits * model.vocab_size * logit_bytes
    in_blocks = _block_bytes(config, shape.num_tokens)
    if in_blocks:
        in_blocks += shape.num_tokens * _RESIDUALS * model.width * _FLOAT32
    return math.ceil(max(shape.num_tokens * sums, logits, in_blocks))


def _block_bytes(config: Config, num_tokens: int) -> float:
    """Of experts in few bits, which XLA multiplies in blocks of rows (`layers/stacks.py`), the
    largest stack: padded rows before both products and one's float32 sums, one expert's matrix as
    bytes and expanded, and the scales of all, which a GPU's compiler lays out anew. Kernels need
    less where they multiply so few rows.
    """
    model = config.chip_model
    stored = FORMATS[model.dtype].bytes_for(1, 1)
    largest = 0.0
    for path, info in params.leaves(model.parameters()["layers"]):
        ffn = model.layers[int(path[0])].ffn
        if not isinstance(ffn, Experts) or "experts" not in path:
            continue
        if not FORMATS[info.format].is_quantized:
            continue
        num_rows = num_tokens * config.mesh.expert * ffn.top_k
        num_blocks, block_rows = blocks(num_rows, ffn.num_held, config.engine.deterministic)
        *_, rows, columns = info.shape
        between = (ffn.met_width(model) + ffn.width) * stored
        padded = num_blocks * block_rows * (rows * _FLOAT32 + between)
        largest = max(largest, padded + rows * columns * (1 + stored) + _scale_bytes(info))
    return largest


def _scale_bytes(info: ParamInfo) -> float:
    format = FORMATS[info.format]
    return format.bytes_for(info.elements, info.shape[-1]) - info.elements * format.bits / 8


def _expert_bytes(model: ModelConfig) -> float:
    """For each token of a mixture, the largest of the model's: its copies, both products of them as
    float32 sums, what is stored between, and the results once more in the order of tokens, where a
    TPU gives those of one whole tiles, which have 1, 2, 4 or 8 rows.
    """
    stored = FORMATS[model.dtype].bytes_for(1, 1)
    mixtures = (layer.ffn for layer in model.layers if isinstance(layer.ffn, Experts))
    value_bytes = stored + _FLOAT32
    return max(
        (
            ffn.top_k * value_bytes * (ffn.met_width(model) + (1 + ffn.is_gated) * ffn.width)
            + ffn.met_width(model) * _FLOAT32 * (1 << (ffn.top_k - 1).bit_length())
            for ffn in mixtures
        ),
        default=0.0,
    )


def _table_bytes(model: ModelConfig) -> int:
    """Of the tables of a TPU's asynchronous copies."""
    slices = 0
    for _, info in params.leaves(model.parameters()["layers"]):
        num_bytes = FORMATS[info.format].bytes_for(info.elements, info.shape[-1])
        if info.is_matrix and num_bytes <= _FETCHED_BYTES:
            slices += math.ceil(num_bytes / _SLICE_BYTES)
    return _TABLE_BYTES * (2 * slices + _LAYER_TABLES * model.num_layers)
