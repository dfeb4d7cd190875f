"""Measures what models with states cost in serving: four models of equal size with random weights,
one of them with attention in all its layers.
"""

import dataclasses
import random
import statistics
import time
from collections.abc import Collection
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
from scripts.reports.pages.results import Results, Rows, bar, prose, table, when
from scripts.reports.plots import figures

CONTEXTS, NEW_TOKENS = (256, 1024, 4096, 16_384, 65_536), 32
LENGTHS = {4096: 3, 16_384: 1}  # of prompts, and how often each is timed
REPEATS = 3
LOAD = Workload(
    num_requests=16, prompt=Uniform(30, 200), output=Fixed(8), prefix_tokens=1000, prefix_share=0.75
)
AT_ONCE = 4

# Growth of a decode step's time, of a prompt's, and the error of predicted tokens, at most.
_MOST_GROWTH, _MOST_TIMES, _MOST_OFF = 1.15, 4.4, 0.1

MAMBA, MAMBA2, HYBRID, ATTENTION = "Mamba", "Mamba-2", "hybrid", "attention"
_LONGEST_PROMPT = {ATTENTION: 16_384}  # that is computed: its time grows with the square


ROWS = (MAMBA, MAMBA2, HYBRID, ATTENTION)
# Of the hybrid: snapshots (None: by default), and requests at a time.
KEPT = {
    "no snapshots, one": (0, 1),
    "one": (None, 1),
    f"{AT_ONCE}": (None, AT_ONCE),
}
_COLORS = ("#332288", "#88CCEE", "#44AA99", "#DDCC77")  # of Paul Tol's muted scheme


def _model(name: str, num_layers: int, *pattern: tuple[Mixer, FeedForward | None]) -> ModelConfig:
    layers = tuple(LayerSpec(*each) for each in pattern)
    return ModelConfig(
        name, "mamba", 50_280, 768, num_layers, 1 << 17, layers, norm_eps=1e-5, tied=True
    )


def models() -> dict[str, ModelConfig]:
    """Of 129 million parameters, 768 wide: Mamba and Mamba-2 as they are published with 24 layers;
    a hybrid with attention in one layer of eight, as in Jamba (Lieber et al. 2024, arXiv
    2403.19887); and 12 pairs of attention and feed-forward.
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
    """With room for exactly its sequences at their longest."""
    sizes = {"max_seqs": 1, "decode_rows": (1,), "prefill_chunks": (8,), **settings}
    engine = EngineConfig.of(max_context=max_context, **sizes)
    needed = Config(model, engine).full_bytes(engine.max_seqs)
    config = Config(model, engine.replace(cache_bytes=needed))
    return Engine(config, params.init(decoder.param_infos(model), seed=1))


def _calibrated(engine: Engine) -> HardwareSpec:
    """By the engine's own steps, at no more than 1,024 tokens; they are compiled first."""
    first = TimedRequest(0.0, (7,) * 600, 2)
    measure.measure(engine, [first], 1)
    found = first_start.calibration(engine, anew=True)
    assert found is not None
    return found


# --- decoding -------------------------------------------------------------------------------------


def decode(results: Results, rows: Collection[str]) -> None:
    """Time of a token by what came before it, and the bytes that are kept of that."""
    for name in rows:
        model = models()[name]
        engine = _engine(model, CONTEXTS[-1] + NEW_TOKENS, snapshots=4)
        hardware = _calibrated(engine)
        text = np.random.default_rng(1).integers(100, model.vocab_size, CONTEXTS[-1]).tolist()
        short = text[: CONTEXTS[0] - NEW_TOKENS // 2]
        found: dict[str, dict[str, Any]] = {}
        for context in CONTEXTS:
            step = cost.step_operations(model, Work.decode(1, context))
            own: dict[str, Any] = {"predicted_s": report.seconds(model, step, hardware)}
            if context <= _LONGEST_PROMPT.get(name, context):
                prompt = text[: context - NEW_TOKENS // 2]
                pairs = [(_answered(engine, prompt), _answered(engine, short))
                         for _ in range(REPEATS)]  # fmt: skip
                own |= {figure: statistics.median(long[figure] for long, _ in pairs)
                        for figure in pairs[0][0]}  # fmt: skip
                times = [long["token_s"] / brief["token_s"] for long, brief in pairs]
                own["times"] = statistics.median(times)
            else:  # on pages that nothing was written to
                engine.rebuild()
                own["step_s"] = steps.decode(engine, context, hardware, REPEATS).measured_s
                own["planned"] = cost.cache_bytes(model, context)
                engine.rebuild()
                own["times"] = own["step_s"] / _answered(engine, short)["step_s"]
            found[f"{context}"] = own
        results.put("decode", name, contexts=found)


def _answered(engine: Engine, prompt: list[int]) -> dict[str, float]:
    """Medians over the steps that continue a prompt, which goes on from where an earlier one that
    it begins with ended; and the bytes that its sequence has at its end.
    """
    engine.records.clear()
    engine.add_request(prompt, dataclasses.replace(GREEDY, max_new_tokens=NEW_TOKENS))
    came: list[float] = []
    held: dict[str, float] = {}
    while engine.scheduler.has_work:
        if engine.scheduler.running and came:
            held = _held(engine)
        outputs = engine.step()
        came += [time.perf_counter() for each in outputs for _ in each.token_ids]
    decoded = [record for record in engine.records if not record.shape.prefill[0]]
    return {
        "token_s": float(statistics.median(np.diff(came))),
        "step_s": statistics.median(record.seconds for record in decoded),
        "host_s": statistics.median(record.host_s for record in decoded),
        **held,
    }


def _held(engine: Engine) -> dict[str, float]:
    """Bytes of the arrays that the one running sequence has for itself, and as planned for so many
    tokens as its pages have room for.
    """
    config, cache = engine.config, engine.model_runner.cache
    (sequence,) = engine.scheduler.running
    states = [leaf.states for leaf in cache if isinstance(leaf, kv_cache.Recurrent)]
    allocated, room = _num_bytes(states) / (config.engine.max_seqs + 1), 0
    for group, (pages, own) in enumerate(
        zip(config.num_pages, config.cached_model.page_groups, strict=True)
    ):
        count = len(sequence.pages[group])
        parts = [cache[layer].part(own.part) for layer in own.layers]
        allocated += _num_bytes(parts) / pages * count
        room = count * config.page_tokens
    return {"allocated": allocated, "planned": cost.cache_bytes(config.model, room)}


def _num_bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def _growth(found: dict[str, dict[str, float]]) -> float:
    return found[f"{CONTEXTS[-1]}"]["predicted_s"] / found[f"{CONTEXTS[0]}"]["predicted_s"]


def of_decode(found: Rows) -> list[str]:
    """The section of `decode`."""
    rows, grown = [], []
    for name, own in found.items():
        contexts = own["contexts"]
        for context, point in contexts.items():
            token_s = point.get("token_s")
            if point["planned"] != point.get("allocated", point["planned"]):
                raise ValueError(f"{name}: {point} tells bytes that differ")
            rows.append((
                name, f"{int(context):,}", f"{point['predicted_s'] * 1e3:.1f}",
                f"{point['step_s'] * 1e3:.1f}", f"{point['predicted_s'] / point['step_s']:.2f}",
                "" if token_s is None else f"{token_s * 1e3:.1f}",
                f"{point['planned'] / 1e6:.2f}",
                f"{point['allocated'] / 1e6:.2f}" if "allocated" in point else "",
            ))  # fmt: skip
        predicted, times = _growth(contexts), contexts[f"{CONTEXTS[-1]}"]["times"]
        required = _MOST_GROWTH if name in (MAMBA, MAMBA2) else None
        grown.append((name, f"{predicted:.2f}", f"{times:.2f}",
                      "" if required is None else _at_most(times, required)))  # fmt: skip
    columns = (
        "model", "context", "a step, predicted, ms", "measured, ms", "predicted / measured",
        "a token, ms", "cache, planned, MB", "allocated, MB",
    )  # fmt: skip
    return [
        "## Decoding by context",
        *prose(
            "One request on an engine with room for",
            f"{CONTEXTS[-1]:,} tokens: medians of {REPEATS} times",
            f"{NEW_TOKENS} tokens around each context, whose prompts were computed, weights and",
            "pages in bfloat16, states in float32. A step is what the engine records, a token the",
            "time from one to the next as a caller sees them. The planner's constants come from",
            "the same engine's steps at no more than 1,024 tokens. Where no token's time is told,",
            "the prompt was not computed, since attention to all of it would take minutes: that",
            f"step reads pages that are empty. {when(found)}.",
        ),
        *table(columns, rows),
        *prose(
            f"A token behind {CONTEXTS[-1]:,} tokens takes so many times as long as one behind",
            f"{CONTEXTS[0]}, which was timed right after it: the median of {REPEATS} such pairs.",
        ),
        *table(("model", "predicted", "measured", "required"), grown),
    ]  # fmt: skip


def picture(found: Rows) -> bytes:
    """Time of a step, and bytes of what is kept, by context."""

    def draw(left: Any, right: Any) -> None:
        for (name, own), color in zip(found.items(), _COLORS, strict=False):
            contexts = own["contexts"]
            at = [int(context) for context in contexts]
            for figure, style in (("predicted_s", "--"), ("step_s", "o-")):
                times = [1e3 * point[figure] for point in contexts.values()]
                label = name if style == "o-" else None
                left.plot(at, times, style, color=color, label=label)
            kept = [point["planned"] / 1e6 for point in contexts.values()]
            right.plot(at, kept, "o-", color=color)
        left.set(xscale="log", ylim=(0, None), xlabel="tokens of context")
        left.set(ylabel="a decode step, ms (broken line: predicted)")
        right.set(xscale="log", yscale="log", xlabel="tokens of context", ylabel="kept, MB")
        left.legend()

    return figures.png("Decoding by context: four models of one size", draw)


def _at_most(value: float, required: float) -> str:
    return f"≤ {required:g}, {'met' if value <= required else 'missed'}"


# --- prompts --------------------------------------------------------------------------------------


def prefill(results: Results, rows: Collection[str]) -> None:
    """Seconds to the first token by the length of a prompt."""
    for name in rows:
        model = models()[name]
        engine = _engine(model, max(LENGTHS) + 1, prefix_cache=False)
        hardware, found = _calibrated(engine), {}
        for length, repeats in LENGTHS.items():
            prompt = requests.random_tokens(length, model.vocab_size, random.Random(length))
            load = [TimedRequest(0.0, prompt, 1)]
            said = measure.predict(engine.config, load, hardware).seconds
            runs = measure.measure(engine, load, repeats)
            took = statistics.median(run.seconds for run in runs)
            found[f"{length}"] = {"predicted_s": said, "measured_s": took}
        results.put("prefill", name, lengths=found)


def of_prefill(found: Rows) -> list[str]:
    """The section of `prefill`."""
    rows = []
    for name, own in found.items():
        short, long = (own["lengths"][f"{length}"] for length in LENGTHS)
        times = long["measured_s"] / short["measured_s"]
        rows.append((
            name,
            *(f"{at[of]:.2f}" for at in (short, long) for of in ("predicted_s", "measured_s")),
            f"{long['predicted_s'] / short['predicted_s']:.2f}", f"{times:.2f}",
            _at_most(times, _MOST_TIMES) if name in (MAMBA, MAMBA2) else "",
        ))  # fmt: skip
    columns = ["model"]
    for length in LENGTHS:
        columns += [f"{length:,} tokens, predicted, s", "measured, s"]
    return [
        "## Prompts by length",
        *prose(
            "Seconds to the first token, in steps of eight chunks of 64 tokens, medians of",
            f"{' and '.join(map(str, LENGTHS.values()))}; predicted before the run by the",
            "scheduler on a simulated clock.",
            f"{when(found)}.",
        ),
        *table((*columns, "times as long, predicted", "measured", "required"), rows),
    ]


# --- prefixes -------------------------------------------------------------------------------------


def snapshots(results: Results, rows: Collection[str]) -> None:
    """Prompt tokens that are computed without snapshots of states and with them."""
    model = models()[HYBRID]
    load = requests.generate(LOAD, model.vocab_size, min(LENGTHS))
    longest = max(range(len(load)), key=lambda nth: len(load[nth].prompt))
    shared = load[longest].prompt[: LOAD.prefix_tokens]
    prompts = [
        (len(each.prompt), LOAD.prefix_tokens * (each.prompt[: LOAD.prefix_tokens] == shared))
        for each in load
    ]
    for name in rows:
        kept, at_once = KEPT[name]
        most = max(each.num_tokens for each in load)
        engine = _engine(
            model, most, snapshots=kept, max_seqs=AT_ONCE, decode_rows=(AT_ONCE,)
        )  # fmt: skip
        hardware = _calibrated(engine)
        said = measure.predict(engine.config, load, hardware, 0.0, at_once)
        measure.measure(engine, load, 1, at_once)  # compiles
        runs = measure.measure(engine, load, REPEATS, at_once)
        cache, layers = engine.model_runner.cache, engine.config.cached_groups[-1].layers
        results.put(
            "snapshots", name, prompt_tokens=sum(length for length, _ in prompts),
            by_lengths=cache_policy.computed_tokens(engine.config, prompts),
            simulated=_computed(said), computed=statistics.median(map(_computed, runs)),
            distance=cache_policy.snapshot_tokens(engine.config),
            number=engine.config.num_snapshots,
            planned_bytes=engine.config.state_bytes(0),
            allocated_bytes=_num_bytes(
                [cache[layer].part(SNAPSHOTS) for layer in layers]
            ),
            predicted_ttft_s=measure.figures([said])["ttft_p50_s"],
            ttft_s=measure.figures(runs)["ttft_p50_s"],
        )  # fmt: skip


def _computed(run: Run) -> int:
    """Prompt tokens that were not found in the cache."""
    return run.counters["num_prompt_tokens"] - run.counters["num_cached_tokens"]


def of_snapshots(found: Rows) -> list[str]:
    """The section of `snapshots`."""
    rows = []
    for name, own in found.items():
        if own["planned_bytes"] != own["allocated_bytes"]:
            raise ValueError(f"{name}: {own} tells bytes that differ")
        said = own["by_lengths"] if KEPT[name][1] == 1 else own["simulated"]
        off = abs(said / own["computed"] - 1)
        rows.append((
            name, f"{own['prompt_tokens']:,}", f"{own['by_lengths']:,}",
            f"{own['simulated']:,.0f}", f"{own['computed']:,.0f}", f"{off:.1%}",
            bar(off, _MOST_OFF), f"{own['number']}", f"{own['planned_bytes'] / 1e6:.1f}",
            f"{own['allocated_bytes'] / 1e6:.1f}", f"{own['predicted_ttft_s']:.2f}",
            f"{own['ttft_s']:.2f}",
        ))  # fmt: skip
    columns = (
        "requests at a time", "prompt tokens", "computed, by lengths", "by simulation",
        "measured", "off", "required", "snapshots", "planned, MB", "allocated, MB",
        "first token, predicted, s", "measured, s",
    )  # fmt: skip
    distance = max(own["distance"] for own in found.values())
    return [
        "## Prefixes",
        *prose(
            f"The hybrid; {LOAD.num_requests} requests, of which {LOAD.prefix_share:.0%} begin",
            f"with the same {LOAD.prefix_tokens:,} tokens, each with 30 to 200 of its own.",
            "Pages of attention are shared wherever they are equal; states go on from snapshots",
            f"alone, made at a prompt's last page, where prompts part, and every {distance:,}",
            "tokens. By lengths: as if requests came one after another",
            "(`cache_policy.computed_tokens`); by simulation: the scheduler on a clock of its own.",
            "One of the snapshots is a sink.",
            f"{when(found)}.",
        ),
        *table(columns, rows),
    ]
