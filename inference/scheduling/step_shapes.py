"""The static side of a step: which rectangles it has, and whether prompts are scored."""

import dataclasses
from collections.abc import Iterable

from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.heads import Eagle
from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated, Plain
from configs.kinds.latent import Latent
from configs.model import ModelConfig

MAX_SHAPES = 32  # warming up compiles them all


@dataclasses.dataclass(frozen=True)
class StepShape:
    """The key of one compiled executable.

    Attributes:
        decode: (rows, 1 + k) of the decode rectangle.
        prefill: (chunks, tokens each) of the prefill rectangle.
        scored: log-probabilities of `targets` are computed for every prefill token.
        greedy: every sampled token is the largest of the model's own logits: no parameters are
            read, and nothing is drawn. The others serve such requests too.
    """

    decode: tuple[int, int]
    prefill: tuple[int, int]
    scored: bool = False
    greedy: bool = False

    @property
    def num_rows(self) -> int:
        """Y: rows of both rectangles."""
        return self.decode[0] + self.prefill[0]

    @property
    def num_tokens(self) -> int:
        """T: packed tokens."""
        return self.decode[0] * self.decode[1] + self.prefill[0] * self.prefill[1]

    @property
    def num_logits(self) -> int:
        """Q: rows of logits; every decode token and the last token of a chunk."""
        return self.decode[0] * self.decode[1] + self.prefill[0]

    @property
    def name(self) -> str:
        """Its rectangles and what sets it apart, for people and for names of files."""
        (rows, width), (chunks, tokens) = self.decode, self.prefill
        parts = [f"decode {rows} x {width}"] * bool(rows)
        parts += [f"prefill {chunks} x {tokens}"] * bool(chunks)
        return " and ".join(parts) + ", scored" * self.scored + ", greedy" * self.greedy


def enumerate_shapes(engine: EngineConfig) -> tuple[StepShape, ...]:
    """Every shape the engine may run, cheapest first; scoring has one step of its own. Decoding
    rides on the steps of prompts and of scoring where prompts are chunked; with `free_padding`
    there are no others for these, and only the fewest chunks have a step for few rows. With drafts,
    steps that only decode are there without, too. Where the number of drafts adapts, a full batch
    rides on prompts without, too, and of chains, where steps are not there twice, steps that only
    decode have half of them, too. With `greedy_steps` those with decode rows that score nothing are
    there twice.

    Raises:
        InputError: the engine's sizes make more than `MAX_SHAPES`.
    """
    sizes, drafts, is_chunked = engine.shapes, engine.drafts, engine.scheduling.chunked_prefill
    width = 1 + drafts.num_drafts
    rows = sorted({min(size, engine.max_seqs) for size in sizes.decode_rows})
    if rows[-1] < engine.max_seqs:
        rows.append(engine.max_seqs)
    chunks = [(n, sizes.chunk_tokens) for n in sorted(set(sizes.prefill_chunks))]
    none = (0, sizes.chunk_tokens)
    riders = sorted({next(size for size in rows if size >= min(8, rows[-1])), rows[-1]})
    if sizes.greedy_steps and drafts.num_drafts:  # twice as many that only decode
        riders = rows[-1:]
    shapes = [StepShape((n, w), none) for n in rows for w in _widths(engine)]
    is_few = sizes.free_padding and is_chunked
    if not is_few:
        shapes += [StepShape((0, width), chunk) for chunk in chunks]
        shapes += [StepShape((0, width), chunks[-1], scored=True)]
    if is_chunked:
        beside_few = chunks[:1] if is_few else chunks
        shapes += [StepShape((n, width), chunk) for n in riders[:-1] for chunk in beside_few]
        shapes += [StepShape((riders[-1], width), chunk) for chunk in chunks]
        if drafts.adapt_drafts:
            shapes += [StepShape((rows[-1], 1), chunk) for chunk in chunks]
        shapes += [StepShape((rows[-1], width), chunks[-1], scored=True)]
    if sizes.greedy_steps:
        decoding = [shape for shape in shapes if shape.decode[0] and not shape.scored]
        shapes += [dataclasses.replace(shape, greedy=True) for shape in decoding]
    if len(shapes) > MAX_SHAPES:
        raise InputError(
            f"engine.shapes.decode_rows and prefill_chunks make {len(shapes)} step shapes, at most "
            f"{MAX_SHAPES} are compiled: list fewer sizes"
            + (", or set engine.shapes.greedy_steps=false" if sizes.greedy_steps else "")
        )
    return tuple(sorted(shapes, key=_cost))


def leaves_padding_out(config: Config, model: ModelConfig) -> bool:
    """Whether products with the weights of an engine's model, or of its draft, leave padding out:
    those of the CPU's library leave out rows of zeros. Padding may be something else behind some
    layers; where there are experts it is counted, since what one more sequence brings could not be
    added up (`server.engine_process.step_table`).
    """
    kernels = config.engine.kernels
    is_native = kernels.linear == "ffi_cpu" and kernels.attention in (None, "ffi_cpu")
    is_one = config.mesh.num_groups == 1
    return is_native and is_one and _keeps_zeros(config.model) and _keeps_zeros(model)


def _keeps_zeros(model: ModelConfig) -> bool:
    """Whether rows of zeros are known to stay so in all layers: nothing is added to them."""
    if model.norm != "rms" or isinstance(model, Eagle):  # whose state is shifted into padding
        return False
    return all(
        isinstance(layer.mixer, (Attention, Latent))
        and "out" not in getattr(layer.mixer, "biases", ())
        and isinstance(layer.ffn, (Gated, Plain))
        and not layer.ffn.has_bias
        for layer in model.pattern
    )


def choose(
    shapes: tuple[StepShape, ...],
    rows: int,
    chunks: int,
    scored: bool,
    greedy: bool = False,
    width: int = 1,
) -> StepShape:
    """The first shape, which is the cheapest, that a step with these needs fits into; `greedy` says
    that all its requests are, and `width` is 1 + the most drafts of a row.
    """
    return next(
        shape
        for shape in shapes
        if shape.decode[0] >= rows
        and shape.prefill[0] >= chunks
        and (not rows or shape.decode[1] >= width)
        and shape.scored >= scored
        and shape.greedy <= greedy
    )


def expected(
    engine: EngineConfig,
    prompts: Iterable[int],
    num_seqs: int,
    greedy: bool = False,
    num_shards: int = 1,
) -> tuple[StepShape, ...]:
    """The steps that come first where these prompts, of so many tokens, are all that there is: one
    that prefills them, as far as a step can, and one that decodes the sequences that go on from
    them, as many as there are slots; `greedy` says that all their requests are, and data shards
    take equal parts of them.
    """
    shapes, sizes = enumerate_shapes(engine), engine.shapes
    num_chunks = sum(-(-length // sizes.chunk_tokens) for length in list(prompts)[::num_shards])
    num_chunks = min(num_chunks, max(sizes.prefill_chunks))
    num_rows = min(-(-num_seqs // num_shards), engine.max_seqs)
    widths = _widths(engine) if engine.drafts.proposer else [1]
    widths = widths if engine.drafts.adapt_drafts else widths[-1:]
    decoding = (choose(shapes, num_rows, 0, False, greedy, width) for width in widths)
    return choose(shapes, 0, num_chunks, False, greedy), *decoding


def _widths(engine: EngineConfig) -> list[int]:
    """Of the decode rectangle where nothing else is."""
    drafts = engine.drafts
    has_half = drafts.adapt_drafts and not engine.shapes.greedy_steps and not drafts.has_tree
    half = {1 + drafts.num_drafts // 2} if has_half else {1}
    return sorted({1, 1 + drafts.num_drafts} | half)


def _cost(shape: StepShape) -> tuple[int, int, bool, bool]:
    return shape.num_tokens, shape.num_logits, shape.scored, not shape.greedy
