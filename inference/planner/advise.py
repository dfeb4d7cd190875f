"""Which techniques together: every combination for a workload, ranked, with the gain and the price
of each part.
"""

import dataclasses
from collections.abc import Iterator

from configs.errors import InputError
from configs.mesh import Mesh
from configs.precision import CACHE_FORMATS, FORMATS
from inference.planner import acceptance, slo
from inference.planner.cost import Precision
from inference.planner.deployment import Deployment
from inference.planner.kinds import latents, mixtures
from inference.planner.kinds.latents import Cached, Chunk
from inference.planner.kinds.mixtures import Mixture
from inference.planner.parallel import dispatch
from inference.planner.parallel.dispatch import Comparison
from inference.planner.slo import Steady

GOALS = ("throughput", "latency")
_MOST_SEQUENCES = 4096  # a scheduler's, beyond which host work is no longer small


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is asked for: requests of `context` prompt tokens and `new_tokens` new ones, and for how
    many tokens a second ('throughput') or how soon one request is done ('latency').

    Raises:
        InputError: a goal that is neither, or nothing to generate.
    """

    context: int
    new_tokens: int
    goal: str = "throughput"

    def __post_init__(self) -> None:
        if self.goal not in GOALS:
            raise InputError(f"--goal is one of {', '.join(GOALS)}, not {self.goal!r}")
        if self.new_tokens < 1:
            raise InputError(f"--advise needs --new_tokens of at least 1, not {self.new_tokens}")


@dataclasses.dataclass(frozen=True)
class Part:
    """One technique of a combination.

    Attributes:
        gain: how many times better the combination is than without it; None where without it the
            model does not fit.
        costs: its price, in words.
    """

    technique: str
    gain: float | None
    costs: str


@dataclasses.dataclass(frozen=True)
class Choice:
    """A combination at its best batch.

    Attributes:
        deployment: formats, mesh, replicas and speculation.
        batch: sequences of each replica.
        steady: what requests see while every replica is busy.
        request_s: prefill and all new tokens of one request.
        score: larger is better: tokens a second, or requests a second of one sequence.
        parts: the techniques in it.
    """

    deployment: Deployment
    batch: int
    steady: Steady
    request_s: float
    score: float
    parts: tuple[Part, ...] = ()

    @property
    def name(self) -> str:
        """As short as it can be said."""
        placed, drafts = self.deployment, self.deployment.speculation
        formats = placed.formats
        proposed = f", drafts={drafts.drafts}" if drafts else ""
        return (
            f"{formats.weights.name} weights, {formats.cache.name} cache, "
            f"{placed.replicas} x {placed.mesh}{proposed}"
        )


@dataclasses.dataclass(frozen=True)
class Advice:
    """The combinations that fit, best first; the best plain one; and why others were left out.

    Attributes:
        mixture: of the best, where layers have experts.
        exchange: how tokens reach experts in the first that divides these; (): none does.
        caches: the best's latent cache and those of other attention, at its batch, then, of the
            first that divides heads, how chips hold latents; (): none are cached.
        chunks: steps that compute the ends of prompts on the best, absorbed or not; (): no latents.
        expanded_from: tokens of a chunk as `latents.expanded_from` has it there.
    """

    choices: tuple[Choice, ...]
    plain: Choice | None
    excluded: tuple[str, ...]
    mixture: Mixture | None = None
    exchange: tuple[Comparison, ...] = ()
    caches: tuple[Cached, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    expanded_from: int | None = None


_Key = tuple[str, str, Mesh, bool]  # weights, cache, mesh, whether there are drafts


def advise(
    deployment: Deployment, workload: Workload, num_chips: int, fixed: Precision | None = None
) -> Advice:
    """Ranks formats of weights and cache, meshes against replicas, drafts, and the batch.

    Args:
        deployment: model and chips; its precision, mesh, replicas and speculation are what is
            asked for.
        workload: what for.
        num_chips: all of which are used.
        fixed: formats that are given; None tries those that the chip computes with.

    Raises:
        InputError: nothing fits, or a size is out of range.
    """
    if num_chips < 1:
        raise InputError(f"--chips is at least 1, not {num_chips}")
    deployment.check_lengths(1, workload.context, workload.new_tokens)
    found: dict[_Key, Choice] = {}
    excluded: list[str] = []
    for placed in _placed(deployment, num_chips, fixed):
        formats = placed.formats
        if not placed.largest_batch(workload.context, workload.new_tokens):
            excluded.append(_why_not(placed, workload))
            continue
        for drafted in (False, True):
            choice = _best_batch(placed, workload, drafted)
            if choice is not None:
                found[formats.weights.name, formats.cache.name, placed.mesh, drafted] = choice
    if not found:
        raise InputError(f"nothing fits: {excluded[0]}" if excluded else "no mesh divides so")
    ranked = sorted(found.items(), key=lambda item: -item[1].score)
    own = (fixed or Precision.of(deployment.config)).weights.name
    cache = (fixed or Precision.of(deployment.config)).cache.name
    plain = [choice for key, choice in ranked if key[:2] == (own, cache) and not key[3]]
    named = (_with_parts(key, choice, found, workload, (own, cache)) for key, choice in ranked)
    advice = Advice(tuple(named), plain[0] if plain else None, tuple(excluded))
    return _with_kinds(advice, workload)


def _with_kinds(advice: Advice, workload: Workload) -> Advice:
    """The advice with what is worth knowing of experts and of latent caches."""

    def first(axis: str) -> tuple[Deployment, int] | None:
        """The first combination with chips along an axis, without drafts, and its batch."""
        for choice in advice.choices:
            if getattr(choice.deployment.mesh, axis) > 1:
                return dataclasses.replace(choice.deployment, speculation=None), choice.batch
        return None

    context, new_tokens = workload.context, workload.new_tokens
    best = dataclasses.replace(advice.choices[0].deployment, speculation=None)
    latent, caches = latents.latent_of(best.config), list[Cached]()
    if latent is not None:
        caches += latents.compare(best, advice.choices[0].batch, context, new_tokens)
        if divided := first("model"):
            caches += latents.compare_divided(*divided, context, new_tokens)
    spread = first("expert")
    return dataclasses.replace(
        advice,
        mixture=mixtures.describe(best, context, new_tokens),
        exchange=dispatch.compare(*spread, context, new_tokens) if spread else (),
        caches=tuple(caches),
        chunks=latents.compare_chunks(best, context) if latent else (),
        expanded_from=latents.expanded_from(latent, context) if latent else None,
    )


def _placed(
    deployment: Deployment, num_chips: int, fixed: Precision | None
) -> Iterator[Deployment]:
    """Every format on every division of the chips into equal replicas."""
    own = Precision.of(deployment.config)
    # As many bits either way: fp8 where the chip has a rate for it.
    eight = "fp8" if "fp8" in deployment.hardware.rates else "int8"
    narrow = {"fp8": "w8a8_fp8", "int8": "w8a8"}[eight], "int4"
    for mesh in slo.meshes(deployment, num_chips):
        if num_chips % mesh.num_chips:
            continue
        for weights in (own.weights.name, *narrow) if fixed is None else [fixed.weights.name]:
            for cache in (own.cache.name, eight) if fixed is None else [fixed.cache.name]:
                yield dataclasses.replace(
                    deployment,
                    precision=Precision(FORMATS[weights], CACHE_FORMATS[cache], own.rest),
                    mesh=mesh, replicas=num_chips // mesh.num_chips, speculation=None,
                )  # fmt: skip


def _why_not(placed: Deployment, workload: Workload) -> str:
    length = workload.context + workload.new_tokens
    held = (placed.chip_weight_bytes / 1e9, placed.chip_cache_bytes(length) / 1e9)
    return (
        f"{placed.formats.weights.name} weights, {placed.formats.cache.name} cache, "
        f"{placed.replicas} x {placed.mesh}: {held[0]:.1f} GB of weights and {held[1]:.2f} GB a "
        f"sequence on each chip of {placed.hardware.memory_bytes / 1e9:.0f} GB"
    )


def _best_batch(placed: Deployment, workload: Workload, drafted: bool) -> Choice | None:
    """The batch of the best score, with the best drafts for it; None where drafts gain nothing."""
    most = min(_MOST_SEQUENCES, placed.largest_batch(workload.context, workload.new_tokens))
    batches = {1} if workload.goal == "latency" else {most, *(2**n for n in range(12))}
    choices = (_choice(placed, workload, batch, drafted) for batch in batches if batch <= most)
    return max(filter(None, choices), key=lambda choice: choice.score, default=None)


def _choice(placed: Deployment, workload: Workload, batch: int, drafted: bool) -> Choice | None:
    length = workload.context + workload.new_tokens
    if drafted:
        proposed = acceptance.best(placed, batch, length)
        if proposed is None:
            return None
        placed = dataclasses.replace(placed, speculation=proposed)
    found = slo.steady(placed, batch, workload.context, workload.new_tokens)
    request_s = found.prefill_s + (workload.new_tokens - 1) * found.tpot_s
    score = found.output_tok_s if workload.goal == "throughput" else 1 / request_s
    return Choice(placed, batch, found, request_s, score)


def _with_parts(
    key: _Key, choice: Choice, found: dict[_Key, Choice], workload: Workload, own: tuple[str, str]
) -> Choice:
    """The choice and, for each technique in it, how it compares with leaving that one out."""
    weights, cache, mesh, drafted = key
    placed = choice.deployment

    def part(technique: str, without: Choice | None, costs: str) -> Part:
        return Part(technique, choice.score / without.score if without else None, costs)

    parts = []
    if weights != own[0]:
        other = found.get((own[0], cache, mesh, drafted))
        parts.append(part(f"{weights} weights", other, "rounding: compare perplexities"))
    if cache != own[1]:
        other = found.get((weights, own[1], mesh, drafted))
        parts.append(part(f"{cache} cache", other, "rounding: compare perplexities at this length"))
    others = [c for k, c in found.items() if (k[0], k[1], k[3]) == (weights, cache, drafted)
              and k[2] != mesh]  # fmt: skip
    if placed.mesh.num_chips * placed.replicas > 1:
        other = max(others, key=lambda c: c.score, default=None)
        parts.append(part(f"{placed.replicas} x {mesh}", other, _layout_costs(choice, workload)))
    if drafted and placed.speculation:
        size = placed.speculation.size
        wasted = 1 - placed.tokens_per_step / (1 + placed.drafts)
        parts.append(part(
            f"drafts={placed.drafts} of a model {1 / size:.0f} x smaller",
            found.get((weights, cache, mesh, False)),
            f"its memory and a second model to keep; {wasted:.0%} of what is verified is refused",
        ))  # fmt: skip
    if choice.batch > 1:
        alone = dataclasses.replace(placed, speculation=None)
        single = _choice(alone, workload, 1, drafted) or _choice(alone, workload, 1, False)
        slower = choice.steady.tpot_s / single.steady.tpot_s if single else 1
        costs = f"each request's tokens come {slower:.1f} x slower than alone"
        parts.append(part(f"batch={choice.batch}", single, costs))
    return dataclasses.replace(choice, parts=tuple(parts))


def _layout_costs(choice: Choice, workload: Workload) -> str:
    placed = choice.deployment
    if placed.mesh.num_chips == 1:
        return f"{placed.chip_weight_bytes / 1e9:.1f} GB of weights on every chip"
    step = placed.decode_time(choice.batch, workload.context + workload.new_tokens // 2)
    return f"{step.collective_s / step.total_s:.0%} of a step is exchange between chips"
