"""What `scripts.reports.caches` measures of each cache, a part of its page at a time."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np

from configs.engine import Config, EngineConfig
from configs.hardware import catalog
from configs.model import ModelConfig
from configs.models.character_ai import CHARACTER_AI
from configs.models.llama import LLAMA2_13B, LLAMA2_70B
from configs.precision import FORMATS
from configs.workload import Uniform, Workload
from inference.benchmark import first_start, measure, requests, steps
from inference.benchmark.quality import needle, perplexity
from inference.checkpoints import resolve
from inference.checkpoints.opened import Checkpoint
from inference.engine import Engine
from inference.planner import cost
from inference.planner.cost import Precision
from inference.planner.deployment import Deployment
from inference.request import SamplingParams
from layers import decoder, params
from scripts.reports.caches import kinds
from scripts.reports.pages.results import Results

MODELS = ("smollm2-135m", "gemma3-270m")
LENGTH, TOKENS = 2048, 15 * 2048  # of a window that is scored, and of the text
NEEDLES, NEEDLE_TOKENS = 20, 2000
CONTEXTS, ROWS, REPEATS = (4096, 16_384), 8, 5
PUBLISHED = {
    # Weights of 70B take 138 GB in bfloat16: on one chip they have four bits.
    "Llama-2-13B": (LLAMA2_13B.config, "bfloat16"),
    "Llama-2-70B": (LLAMA2_70B.config, "int4"),
}
LENGTHS = (2048, 4096)
MEMORY = 80_000_000_000
# Many times as many requests as run at once: while the last ones end, room is left.
LOAD = Workload(num_requests=768, prompt=Uniform(32, 96), output=Uniform(32, 96))
CACHE_BYTES = 48 << 20  # some sixteen of these requests in bfloat16


def in_order(parts: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The rows that are measured today, in the order of their declaration."""
    trained, declared = (list(of(kinds.REFERENCE)) for of in (kinds.trained, kinds.declared))
    rows = {
        "bytes": declared,
        "published": list(parts.get("published", {})),
        "quality": [f"{model}: {kind}" for model in MODELS for kind in trained],
        "needle": [*trained, kinds.SNAP],
        "time": list(kinds.timed(kinds.REFERENCE)),
        "batch": [f"{model}: {kind}" for model in PUBLISHED for kind in declared],
        "overload": list(kinds.at_once(kinds.REFERENCE)),
    }
    return {
        part: {row: found[row] for row in rows[part] if row in found}
        for part, found in parts.items()
    }


# --- bytes ----------------------------------------------------------------------------------------


def bytes_held(results: Results, rows: Collection[str]) -> None:
    """Bytes of a token, by the planner and in the arrays of an engine."""
    for name, model in kinds.declared(kinds.REFERENCE).items():
        if name in (rows or (name,)):
            held = cost.cache_bytes(model, CONTEXTS[0])
            results.put("bytes", name, held=held, **_allocated(model, LENGTH))
    published = CHARACTER_AI.config
    for name, model in {
        published.name: published,
        f"{published.name}, MHA": _all_heads(published),
    }.items():
        if name in (rows or (name,)):
            held = cost.cache_bytes(model, CONTEXTS[0])
            results.put("published", name, held=held, **_allocated(model, 256))


def _all_heads(model: ModelConfig) -> ModelConfig:
    """With a key/value head for each query head in each layer, which sees all tokens."""
    plain = model.with_kinds(owner=None, window=None)
    return plain.with_kinds(num_kv_heads=plain.pattern[0].mixer.query_heads)


def _narrow(model: ModelConfig) -> ModelConfig:
    """One with the same caches, and nothing else as wide."""
    return dataclasses.replace(model.with_kinds(width=64), width=64, vocab_size=256)


def _allocated(model: ModelConfig, context: int) -> dict[str, Any]:
    """Of one sequence's pages."""
    model = dataclasses.replace(_narrow(model), max_context=context)
    engine = EngineConfig(max_seqs=1)
    needed = Config(model, engine).full_bytes(1)
    config = Config(model, engine.replace(cache_bytes=needed))
    runner = Engine(config, params.init(decoder.param_infos(model))).model_runner
    config, token = runner.config, 0.0
    for pages, group in zip(config.num_pages, config.model.page_groups, strict=True):
        for layer in group.layers:
            leaf = runner.cache[layer].part(group.part)
            token += _num_bytes(leaf) / (pages * config.page_tokens)
    return {
        "predicted": cost.cache_bytes_per_token(model), "allocated": token,
        "pool_predicted": config.pool_bytes, "pool_allocated": _num_bytes(runner.cache),
    }  # fmt: skip


def _num_bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


# --- quality --------------------------------------------------------------------------------------


def quality(results: Results, rows: Collection[str], models: Collection[str] = MODELS) -> None:
    """Perplexity, and how often the likeliest token is that of the plain cache."""
    for name in models:
        resolved = resolve.resolve(name)
        checkpoint = resolved.open(None)
        tokenizer = checkpoint.load_tokenizer()
        tokens = tokenizer.encode(perplexity.default_text(), add_special=False)[:TOKENS]
        windows = perplexity.windows(tokens, perplexity.start(tokenizer), LENGTH)
        plain = None
        for kind, model in kinds.trained(resolved.config).items():
            if kind not in (rows or (kind,)) and plain is not None:
                continue
            logprobs, likeliest = _scored(checkpoint, model, windows)
            plain = likeliest if plain is None else plain
            results.put(
                "quality", f"{name}: {kind}", perplexity=perplexity.of(logprobs),
                tokens=len(logprobs), agreement=float((likeliest == plain).mean()),
            )  # fmt: skip


def _scored(
    checkpoint: Checkpoint, model: ModelConfig, windows: Sequence[list[int]]
) -> tuple[list[float], np.ndarray]:
    """The log-probability of each token, and the likeliest one in its place."""
    scores = _engine(checkpoint, model, max_seqs=4, top_logprobs=1).score(windows)
    likeliest = [id for each in scores for top in each.top_logprobs for id in top]
    return [logprob for each in scores for logprob in each.logprobs], np.array(likeliest)


def _engine(checkpoint: Checkpoint, model: ModelConfig, **settings: Any) -> Engine:
    engine = EngineConfig.of(
        max_context=LENGTH, cache_bytes=1 << 30, decode_rows=(4,), prefill_chunks=(8,), **settings
    )
    return Engine.from_checkpoint(Config(model, engine), checkpoint)


def needles(results: Results, rows: Collection[str]) -> None:
    """Which facts of a text are found."""
    resolved = resolve.resolve(kinds.REFERENCE.name)
    checkpoint = resolved.open(None)
    tokenizer = checkpoint.load_tokenizer()
    asked = needle.needles(
        perplexity.default_text(), lambda text: tokenizer.encode(text, add_special=False),
        NEEDLE_TOKENS, NEEDLES, perplexity.start(tokenizer),
    )  # fmt: skip
    every = kinds.trained(resolved.config) | {kinds.SNAP: resolved.config}
    for kind, model in every.items():
        if kind in (rows or (kind,)):
            budget = kinds.BUDGET if kind == kinds.SNAP else None
            # One after another, the last first: the others find what is before their facts cached.
            engine = _engine(checkpoint, model, max_seqs=1, prompt_budgets=budget is not None)
            answers = engine.generate(
                [each.prompt for each in reversed(asked)],
                SamplingParams(max_new_tokens=8, prompt_budget=budget),
            )[::-1]
            found = [own.is_found(each.text) for own, each in zip(asked, answers, strict=True)]
            results.put("needle", kind, found=found)


# --- time -----------------------------------------------------------------------------------------


def seconds(results: Results, rows: Collection[str]) -> None:
    """Decode steps, predicted and measured; with a row, that which it is compared with."""
    reference = dataclasses.replace(kinds.REFERENCE, max_context=2 * CONTEXTS[-1])
    every = kinds.timed(reference)
    wanted = {other for name in rows or every for other in (name, *every.get(name, ())[:1])}
    hardware = first_start.of_model(reference)
    for name, (beside, model) in every.items():
        if name not in wanted:
            continue
        values = params.init(decoder.param_infos(model), seed=1)
        found: dict[str, Any] = {"beside": beside, "predicted_s": {}, "measured_s": {}}
        for context in CONTEXTS:
            config = steps.sizes(Config(model, EngineConfig()), ROWS, context)
            step = steps.decode(Engine(config, values), context, hardware, REPEATS)
            found["predicted_s"][f"{context}"] = step.predicted_s
            found["measured_s"][f"{context}"] = step.measured_s
        results.put("time", name, **found)


# --- requests at once -----------------------------------------------------------------------------


def batch(results: Results, rows: Collection[str]) -> None:
    """The largest batch that the planner finds room for."""
    chip = dataclasses.replace(catalog.get("h100"), memory_bytes=MEMORY)
    for name, (published, weights) in PUBLISHED.items():
        for kind, model in kinds.declared(published).items():
            if kind not in (rows or (kind,)):
                continue
            own = Precision.of(model)
            precision = Precision(FORMATS[weights], own.cache, own.rest)
            deployment = Deployment(model, chip, precision)
            found = {f"{length}": deployment.largest_batch(length) for length in LENGTHS}
            results.put("batch", f"{name}: {kind}", sequences=found)


def overload(results: Results, rows: Collection[str]) -> None:
    """How many of more requests than fit an engine runs at once, in equal memory."""
    engine = EngineConfig.of(
        max_seqs=128, decode_rows=(128,), prefill_chunks=(4,), max_context=256, prefix_cache=False,
        cache_bytes=CACHE_BYTES, expected_tokens=LOAD.expected_tokens,
    )  # fmt: skip
    reference = _narrow(kinds.REFERENCE)
    load = requests.generate(LOAD, reference.vocab_size, LENGTH)
    for kind, model in kinds.at_once(reference).items():
        if kind in (rows or (kind,)):
            values = params.init(decoder.param_infos(model), seed=1)
            run = measure.measure(Engine(Config(model, engine), values), load, 1)
            figures = measure.figures(run)
            names = "running_p50", "running_mean", "running_peak", "preemptions"
            results.put("overload", kind, **{name: figures[name] for name in names})
