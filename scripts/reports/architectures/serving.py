"""Measures what models with states cost in serving: four models of equal size with random weights,
one of them with attention in all its layers.
"""

import dataclasses
import random
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from configs.cache import SNAPSHOTS
from configs.engine import Config, EngineConfig
from configs.hardware.spec import HardwareSpec
from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated
from configs.kinds.kind import FeedForward, Mixer
from configs.kinds.recurrent.mamba import Mamba2
from configs.kinds.recurrent.selective import Mamba
from configs.model import LayerSpec, ModelConfig
from configs.workload import Fixed, Uniform, Workload
from inference.benchmark import first_start, measure, requests, steps
from inference.benchmark.drive import GREEDY, Run
from inference.benchmark.requests import TimedRequest
from inference.engine import Engine
from inference.planner import cache_policy, cost, report
from inference.planner.cost import Work
from layers import decoder, kv_cache, params
from scripts.reports.pages.markdown import prose, table
from scripts.reports.pages.results import COLORS, Results, Row, Rows, verdict
from scripts.reports.plots import figures
from scripts.reports.plots.figures import Axes

CONTEXTS, NEW_TOKENS = (256, 1024, 4096, 16_384, 65_536), 32
LENGTHS = {4096: 3, 16_384: 1}  # of prompts, and how often each is timed
REPEATS = 3
LOAD = Workload(
    num_requests=16, prompt=Uniform(30, 200), output=Fixed(8), prefix_tokens=1000, prefix_share=0.75
)
AT_ONCE = 4

# Growth of a decode step's time, of a prompt's, and the error of predicted tokens, at most.
_MAX_GROWTH, _MAX_PROMPT_RATIO, _MAX_ERROR = 1.15, 4.4, 0.1

MAMBA, MAMBA2, HYBRID, ATTENTION = ROWS = ("Mamba", "Mamba-2", "hybrid", "attention")
_LONGEST_PROMPT = {ATTENTION: 16_384}  # that is computed: its time grows with the square
# Of the hybrid: snapshots (None: by default), and requests at a time.
SNAPSHOT_ROWS = {"no snapshots, one": (0, 1), "one": (None, 1), f"{AT_ONCE}": (None, AT_ONCE)}


def _model(name: str, num_layers: int, *pattern: tuple[Mixer, FeedForward | None]) -> ModelConfig:
    layers = tuple(LayerSpec(mixer, ffn) for mixer, ffn in pattern)
    return ModelConfig(
        name, "mamba", 50_280, 768, num_layers, 1 << 17, layers, norm_eps=1e-5, tied=True
    )


def models() -> dict[str, ModelConfig]:
    """Returns models of 129 million parameters, 768 wide: Mamba and Mamba-2 as they are published
    with 24 layers; a hybrid with attention in one layer of eight, as in Jamba (Lieber et al. 2024,
    arXiv 2403.19887); and 12 pairs of attention and feed-forward.
    """
    attention, state = Attention(12, num_kv_heads=4, head_width=64), Mamba2(24, 64, 128)
    return {
        MAMBA: _model("serve-mamba", 24, (Mamba(1536, 16, 48), None)),
        MAMBA2: _model("serve-mamba2", 24, (state, None)),
        HYBRID: _model(
            "serve-hybrid", 24,
            *[(state, None)] * 4, (attention, Gated(960)), *[(state, None)] * 3,
        ),
        ATTENTION: _model("serve-attention", 12, (attention, Gated(2560))),
    }  # fmt: skip


def _engine(model: ModelConfig, max_context: int, **settings: Any) -> Engine:
    """Builds an engine with room for exactly its sequences at their longest."""
    sizes = {"max_seqs": 1, "decode_rows": (1,), "prefill_chunks": (8,), **settings}
    engine = EngineConfig.of(max_context=max_context, **sizes)
    needed = Config(model, engine).full_bytes(engine.max_seqs)
    config = Config(model, engine.replace(cache_bytes=needed))
    return Engine(config, params.init(decoder.param_infos(model), seed=1))


def _calibrated(engine: Engine) -> HardwareSpec:
    """Calibrates by the engine's own steps at no more than 1,024 tokens, once they are compiled."""
    first = TimedRequest(0.0, (7,) * 600, 2)
    measure.measure(engine, [first], 1)
    hardware = first_start.calibration(engine, anew=True)
    assert hardware is not None
    return hardware


# --- decoding -------------------------------------------------------------------------------------


def decode(results: Results, rows: Sequence[str]) -> None:
    """Measures a token's time by its context, and the bytes that the context takes."""
    for name in rows:
        model = models()[name]
        engine = _engine(model, CONTEXTS[-1] + NEW_TOKENS, snapshots=4)
        hardware = _calibrated(engine)
        text = np.random.default_rng(1).integers(100, model.vocab_size, CONTEXTS[-1]).tolist()
        short = text[: CONTEXTS[0] - NEW_TOKENS // 2]
        points: Rows = {}
        for context in CONTEXTS:
            step = cost.step_operations(model, Work.decode(1, context))
            point: Row = {"predicted_s": report.seconds(model, step, hardware)}
            if context <= _LONGEST_PROMPT.get(name, context):
                prompt = text[: context - NEW_TOKENS // 2]
                pairs = [(_answered(engine, prompt), _answered(engine, short))
                         for _ in range(REPEATS)]  # fmt: skip
                point |= {figure: statistics.median(long[figure] for long, _ in pairs)
                          for figure in pairs[0][0]}  # fmt: skip
                ratios = [long["token_s"] / brief["token_s"] for long, brief in pairs]
                point["times"] = statistics.median(ratios)
            else:  # on pages that nothing was written to
                engine.rebuild()
                point["step_s"] = steps.decode(engine, context, hardware, REPEATS).measured_s
                point["planned"] = cost.cache_bytes(model, context)
                engine.rebuild()
                point["times"] = point["step_s"] / _answered(engine, short)["step_s"]
            points[f"{context}"] = point
        results.put("decode", name, contexts=points)


def _answered(engine: Engine, prompt: list[int]) -> dict[str, float]:
    """Returns medians over the steps that continue a prompt, and its sequence's bytes at the end. A
    prompt that begins with an earlier one goes on from that one's end.
    """
    engine.records.clear()
    engine.add_request(prompt, dataclasses.replace(GREEDY, max_new_tokens=NEW_TOKENS))
    token_times: list[float] = []
    sizes: dict[str, float] = {}
    while engine.scheduler.has_work:
        if engine.scheduler.running and token_times:
            sizes = _sequence_bytes(engine)
        outputs = engine.step()
        token_times += [time.perf_counter() for output in outputs for _ in output.token_ids]
    decoded = [record for record in engine.records if not record.shape.prefill[0]]
    return {
        "token_s": float(statistics.median(np.diff(token_times))),
        "step_s": statistics.median(record.seconds for record in decoded),
        "host_s": statistics.median(record.host_s for record in decoded),
        **sizes,
    }


def _sequence_bytes(engine: Engine) -> dict[str, float]:
    """Counts bytes of the one running sequence's arrays, and plans those of as many tokens as its
    pages have room for.
    """
    config, cache = engine.config, engine.model_runner.cache
    (sequence,) = engine.scheduler.running
    states = [leaf.states for leaf in cache if isinstance(leaf, kv_cache.Recurrent)]
    allocated, room = _num_bytes(states) / (config.engine.max_seqs + 1), 0
    groups = zip(config.num_pages, config.cached_model.page_groups, sequence.pages, strict=False)
    for num_pages, group, pages in groups:
        parts = [cache[layer].part(group.part) for layer in group.layers]
        allocated += _num_bytes(parts) / num_pages * len(pages)
        room = len(pages) * config.page_tokens
    return {"allocated": allocated, "planned": cost.cache_bytes(config.model, room)}


def _num_bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def decode_tables(rows: Rows) -> list[str]:
    """Formats what `decode` measured."""
    lines, growth = [], []
    for name, row in rows.items():
        contexts = row["contexts"]
        for context, point in contexts.items():
            token_s = point.get("token_s")
            if point["planned"] != point.get("allocated", point["planned"]):
                raise ValueError(f"{name}: planned and allocated bytes differ: {point}")
            lines.append((
                name, f"{int(context):,}", f"{point['predicted_s'] * 1e3:.1f}",
                f"{point['step_s'] * 1e3:.1f}", f"{point['predicted_s'] / point['step_s']:.2f}",
                "" if token_s is None else f"{token_s * 1e3:.1f}",
                f"{point['planned'] / 1e6:.2f}",
                f"{point['allocated'] / 1e6:.2f}" if "allocated" in point else "",
            ))  # fmt: skip
        short, long = (contexts[f"{context}"] for context in (CONTEXTS[0], CONTEXTS[-1]))
        growth.append((
            name, f"{long['predicted_s'] / short['predicted_s']:.2f}", f"{long['times']:.2f}",
            _at_most(name, long["times"], _MAX_GROWTH),
        ))  # fmt: skip
    columns = (
        "model", "context", "a step, predicted, ms", "measured, ms", "predicted / measured",
        "a token, ms", "cache, planned, MB", "allocated, MB",
    )  # fmt: skip
    compared = (
        f"A token after {CONTEXTS[-1]:,} tokens of context over a token after {CONTEXTS[0]}, timed "
        f"right after it: median of {REPEATS} ratios."
    )
    ratios = table(("model", "predicted", "measured", "required"), growth)
    return [*table(columns, lines), *prose(compared), *ratios]


def picture(rows: Rows) -> bytes:
    """Plots a step's time, and the cache's bytes, by context."""

    def draw(times: Axes, sizes: Axes) -> None:
        for (name, row), color in zip(rows.items(), COLORS, strict=False):
            points = row["contexts"].values()
            contexts = [int(context) for context in row["contexts"]]
            for figure, style in (("predicted_s", "--"), ("step_s", "o-")):
                label = name if style == "o-" else None
                step_ms = [1e3 * point[figure] for point in points]
                times.plot(contexts, step_ms, style, color=color, label=label)
            sizes.plot(contexts, [point["planned"] / 1e6 for point in points], "o-", color=color)
        times.set(xscale="log", ylim=(0, None), xlabel="tokens of context")
        times.set(ylabel="a decode step, ms (broken line: predicted)")
        sizes.set(xscale="log", yscale="log", xlabel="tokens of context", ylabel="kept, MB")
        times.legend()

    return figures.png("Decoding by context: four models of one size", draw)


def _at_most(name: str, ratio: float, limit: float) -> str:
    """Says whether a model with states alone grows as little as was required."""
    if name not in (MAMBA, MAMBA2):
        return ""
    return f"≤ {limit:g}, {'met' if ratio <= limit else 'missed'}"


# --- prompts --------------------------------------------------------------------------------------


def prefill(results: Results, rows: Sequence[str]) -> None:
    """Measures seconds to the first token by the length of a prompt."""
    for name in rows:
        model = models()[name]
        engine = _engine(model, max(LENGTHS) + 1, prefix_cache=False)
        hardware, seconds = _calibrated(engine), {}
        for length, repeats in LENGTHS.items():
            prompt = requests.random_tokens(length, model.vocab_size, random.Random(length))
            load = [TimedRequest(0.0, prompt, 1)]
            predicted_s = measure.predict(engine.config, load, hardware).seconds
            runs = measure.measure(engine, load, repeats)
            measured_s = statistics.median(run.seconds for run in runs)
            seconds[f"{length}"] = {"predicted_s": predicted_s, "measured_s": measured_s}
        results.put("prefill", name, lengths=seconds)


def prefill_table(rows: Rows) -> list[str]:
    """Formats what `prefill` measured."""
    lines = []
    for name, row in rows.items():
        short, long = (row["lengths"][f"{length}"] for length in LENGTHS)
        ratio = long["measured_s"] / short["measured_s"]
        lines.append((
            name,
            *(f"{at[of]:.2f}" for at in (short, long) for of in ("predicted_s", "measured_s")),
            f"{long['predicted_s'] / short['predicted_s']:.2f}", f"{ratio:.2f}",
            _at_most(name, ratio, _MAX_PROMPT_RATIO),
        ))  # fmt: skip
    columns = ["model"]
    for length in LENGTHS:
        columns += [f"{length:,} tokens, predicted, s", "measured, s"]
    return table((*columns, "times as long, predicted", "measured", "required"), lines)


# --- prefixes -------------------------------------------------------------------------------------


def snapshots(results: Results, rows: Sequence[str]) -> None:
    """Counts prompt tokens that are computed without snapshots of states and with them."""
    model = models()[HYBRID]
    load = requests.generate(LOAD, model.vocab_size, min(LENGTHS))
    prefixes = [request.prompt[: LOAD.prefix_tokens] for request in load]
    shared = max(load, key=lambda request: len(request.prompt)).prompt[: LOAD.prefix_tokens]
    prompts = [
        (len(request.prompt), LOAD.prefix_tokens * (prefix == shared))
        for request, prefix in zip(load, prefixes, strict=True)
    ]
    max_context = max(request.num_tokens for request in load)
    for name in rows:
        num_snapshots, at_once = SNAPSHOT_ROWS[name]
        engine = _engine(
            model, max_context, snapshots=num_snapshots, max_seqs=AT_ONCE, decode_rows=(AT_ONCE,)
        )
        hardware = _calibrated(engine)
        simulated = measure.predict(engine.config, load, hardware, 0.0, at_once)
        measure.measure(engine, load, 1, at_once)  # compiles
        runs = measure.measure(engine, load, REPEATS, at_once)
        cache, layers = engine.model_runner.cache, engine.config.cached_groups[-1].layers
        results.put(
            "snapshots", name, prompt_tokens=sum(length for length, _ in prompts),
            by_lengths=computed_tokens(engine.config, prompts),
            simulated=_computed(simulated), computed=statistics.median(map(_computed, runs)),
            distance=cache_policy.snapshot_tokens(engine.config),
            number=engine.config.num_snapshots,
            planned_bytes=engine.config.state_bytes(0),
            allocated_bytes=_num_bytes(
                [cache[layer].part(SNAPSHOTS) for layer in layers]
            ),
            predicted_ttft_s=measure.figures([simulated])["ttft_p50_s"],
            ttft_s=measure.figures(runs)["ttft_p50_s"],
        )  # fmt: skip


def computed_tokens(
    config: Config, prompts: Iterable[tuple[int, int]], hardware: HardwareSpec | None = None
) -> int:
    """Prompt tokens that are computed where prompts come one after another and nothing is evicted,
    of a model whose layers see all of the past, or keep it in states. The latter go on from
    snapshots alone: at the end of an earlier prompt's last page, where earlier prompts were seen to
    part, and every `snapshot_tokens`.

    Args:
        config: model and engine.
        prompts: (tokens, those of them that begin a text which all prompts share), in their order.
        hardware: the machine, which chooses the distance of snapshots; None: as `snapshot_tokens`
            takes it.
    """
    page, has_states = config.page_tokens, config.model.has_states
    interval = cache_policy.snapshot_tokens(config, hardware)
    is_kept = config.engine.cache.prefix_cache and (not has_states or config.num_snapshots > 1)
    num_computed = num_known = 0
    ends: set[int] = set()  # of the snapshots in the shared text
    for num_tokens, num_shared in prompts:
        last = (num_tokens - 1) // page * page  # one token is always fed
        num_hit = min(num_known, num_shared // page * page, last)
        num_matched = (
            max((end for end in ends if end <= num_hit), default=0) if has_states else num_hit
        )
        num_computed += num_tokens - num_matched * is_kept
        num_before = num_shared // page * page
        if not config.model.page_groups:  # no page that a prompt fills tells of its end
            num_before = min(num_before, last)
        num_known = max(num_known, num_before)
        snapshot_ends = {num_hit, last, *range(interval, last, interval or 1)}
        ends |= {end for end in snapshot_ends if num_matched < end <= num_shared}
    return num_computed


def _computed(run: Run) -> int:
    """Returns the number of prompt tokens that were not in the cache."""
    return run.counters["num_prompt_tokens"] - run.counters["num_cached_tokens"]


def snapshots_table(rows: Rows) -> list[str]:
    """Formats what `snapshots` measured."""
    lines = []
    for name, row in rows.items():
        if row["planned_bytes"] != row["allocated_bytes"]:
            raise ValueError(f"{name}: planned and allocated bytes differ: {row}")
        predicted = row["by_lengths"] if SNAPSHOT_ROWS[name][1] == 1 else row["simulated"]
        error = abs(predicted / row["computed"] - 1)
        lines.append((
            name, f"{row['prompt_tokens']:,}", f"{row['by_lengths']:,}",
            f"{row['simulated']:,.0f}", f"{row['computed']:,.0f}", f"{error:.1%}",
            verdict(error, _MAX_ERROR), f"{row['number']}", f"{row['planned_bytes'] / 1e6:.1f}",
            f"{row['allocated_bytes'] / 1e6:.1f}", f"{row['predicted_ttft_s']:.2f}",
            f"{row['ttft_s']:.2f}",
        ))  # fmt: skip
    columns = (
        "requests at a time", "prompt tokens", "computed, by lengths", "by simulation",
        "measured", "off", "required", "snapshots", "planned, MB", "allocated, MB",
        "first token, predicted, s", "measured, s",
    )  # fmt: skip
    return table(columns, lines)
