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
_MAX_SEQUENCES = 4096  # a scheduler's, beyond which host work is no longer small


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
        drafts = self.deployment.speculation
        return f"{self.deployment}{f', drafts={drafts.drafts}' if drafts else ''}"


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
        num_chips: all of which are used.
        fixed: formats that are given; None tries those that the chip computes with.

    Raises:
        InputError: nothing fits, or a size is out of range.
    """
    if num_chips < 1:
        raise InputError(f"--chips is at least 1, not {num_chips}")
    deployment.check_lengths(1, workload.context, workload.new_tokens)
    choices: dict[_Key, Choice] = {}
    excluded: list[str] = []
    for candidate in _candidates(deployment, num_chips, fixed):
        formats = candidate.formats
        if not candidate.largest_batch(workload.context, workload.new_tokens):
            excluded.append(_why_not(candidate, workload))
            continue
        for drafted in (False, True):
            choice = _best_batch(candidate, workload, drafted)
            if choice is not None:
                choices[formats.weights.name, formats.cache.name, candidate.mesh, drafted] = choice
    if not choices:
        raise InputError(f"nothing fits: {excluded[0]}" if excluded else "no mesh divides so")
    ranked = sorted(choices.items(), key=lambda item: -item[1].score)
    usual = fixed or Precision.of(deployment.config)
    names = usual.weights.name, usual.cache.name
    plain = [choice for key, choice in ranked if key[:2] == names and not key[3]]
    explained = (_with_parts(key, choice, choices, workload, names) for key, choice in ranked)
    advice = Advice(tuple(explained), plain[0] if plain else None, tuple(excluded))
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


def _candidates(
    deployment: Deployment, num_chips: int, fixed: Precision | None
) -> Iterator[Deployment]:
    """Every format on every division of the chips into equal replicas."""
    precision = Precision.of(deployment.config)
    # As many bits either way: fp8 where the chip has a rate for it.
    eight = "fp8" if "fp8" in deployment.hardware.rates else "int8"
    narrow = {"fp8": "w8a8_fp8", "int8": "w8a8"}[eight], "int4"
    for mesh in slo.meshes(deployment, num_chips):
        if num_chips % mesh.num_chips:
            continue
        for weights in (precision.weights.name, *narrow) if fixed is None else [fixed.weights.name]:
            for cache in (precision.cache.name, eight) if fixed is None else [fixed.cache.name]:
                yield dataclasses.replace(
                    deployment,
                    precision=Precision(FORMATS[weights], CACHE_FORMATS[cache], precision.rest),
                    mesh=mesh, replicas=num_chips // mesh.num_chips, speculation=None,
                )  # fmt: skip


def _why_not(candidate: Deployment, workload: Workload) -> str:
    cache_bytes = candidate.chip_cache_bytes(workload.context + workload.new_tokens)
    return (
        f"{candidate}: {candidate.chip_weight_bytes / 1e9:.1f} GB of weights and "
        f"{cache_bytes / 1e9:.2f} GB a sequence on each chip of "
        f"{candidate.hardware.memory_bytes / 1e9:.0f} GB"
    )


def _best_batch(candidate: Deployment, workload: Workload, drafted: bool) -> Choice | None:
    """The batch of the best score, with the best drafts for it; None where drafts gain nothing."""
    max_batch = min(_MAX_SEQUENCES, candidate.largest_batch(workload.context, workload.new_tokens))
    batches = {1} if workload.goal == "latency" else {max_batch, *(2**n for n in range(12))}
    choices = (
        _choice(candidate, workload, batch, drafted) for batch in batches if batch <= max_batch
    )
    return max(filter(None, choices), key=lambda choice: choice.score, default=None)


def _choice(deployment: Deployment, workload: Workload, batch: int, drafted: bool) -> Choice | None:
    length = workload.context + workload.new_tokens
    if drafted:
        proposed = acceptance.best(deployment, batch, length)
        if proposed is None:
            return None
        deployment = dataclasses.replace(deployment, speculation=proposed)
    rates = slo.steady(deployment, batch, workload.context, workload.new_tokens)
    request_s = rates.prefill_s + (workload.new_tokens - 1) * rates.tpot_s
    score = rates.output_tok_s if workload.goal == "throughput" else 1 / request_s
    return Choice(deployment, batch, rates, request_s, score)


def _with_parts(
    key: _Key,
    choice: Choice,
    choices: dict[_Key, Choice],
    workload: Workload,
    plain: tuple[str, str],
) -> Choice:
    """The choice and, for each technique in it, how it compares with leaving that one out."""
    weights, cache, mesh, drafted = key
    deployment = choice.deployment

    def part(technique: str, without: Choice | None, costs: str) -> Part:
        return Part(technique, choice.score / without.score if without else None, costs)

    parts = []
    if weights != plain[0]:
        other = choices.get((plain[0], cache, mesh, drafted))
        parts.append(part(f"{weights} weights", other, "rounding: compare perplexities"))
    if cache != plain[1]:
        other = choices.get((weights, plain[1], mesh, drafted))
        parts.append(part(f"{cache} cache", other, "rounding: compare perplexities at this length"))
    layouts = [c for k, c in choices.items() if (k[0], k[1], k[3]) == (weights, cache, drafted)
              and k[2] != mesh]  # fmt: skip
    if deployment.mesh.num_chips * deployment.replicas > 1:
        other = max(layouts, key=lambda c: c.score, default=None)
        parts.append(
            part(f"{deployment.replicas} x {mesh}", other, _layout_costs(choice, workload))
        )
    if drafted and deployment.speculation:
        size = deployment.speculation.size
        wasted = 1 - deployment.tokens_per_step / (1 + deployment.drafts)
        parts.append(part(
            f"drafts={deployment.drafts} of a model {1 / size:.0f} x smaller",
            choices.get((weights, cache, mesh, False)),
            f"its memory and a second model to keep; {wasted:.0%} of what is verified is refused",
        ))  # fmt: skip
    if choice.batch > 1:
        alone = dataclasses.replace(deployment, speculation=None)
        single = _choice(alone, workload, 1, drafted) or _choice(alone, workload, 1, False)
        slower = choice.steady.tpot_s / single.steady.tpot_s if single else 1
        costs = f"each request's tokens come {slower:.1f} x slower than alone"
        parts.append(part(f"batch={choice.batch}", single, costs))
    return dataclasses.replace(choice, parts=tuple(parts))


def _layout_costs(choice: Choice, workload: Workload) -> str:
    deployment = choice.deployment
    if deployment.mesh.num_chips == 1:
        return f"{deployment.chip_weight_bytes / 1e9:.1f} GB of weights on every chip"
    step = deployment.decode_time(choice.batch, workload.context + workload.new_tokens // 2)
    return f"{step.collective_s / step.total_s:.0%} of a step is exchange between chips"
