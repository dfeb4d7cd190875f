"""Measures each cache, a part of the page at a time."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from configs.engine import Config, EngineConfig
from configs.hardware import catalog
from configs.model import ModelConfig
from configs.models.llama import LLAMA2_13B, LLAMA2_70B
from configs.precision import FORMATS
from configs.workload import Uniform, Workload
from inference.benchmark import measure, requests, steps
from inference.benchmark.quality import perplexity
from inference.checkpoints import resolve
from inference.checkpoints.checkpoint import Checkpoint
from inference.engine import Engine
from inference.planner import cost
from inference.planner.cost import Precision
from inference.planner.deployment import Deployment
from inference.request import SamplingParams
from layers import decoder, params
from scripts.reports import machine
from scripts.reports.caches import kinds, needle
from scripts.reports.pages.results import Results, Row

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
LOAD_TOKENS = 32, 96  # of prompts, and of answers
LOAD = Workload(num_requests=768, prompt=Uniform(*LOAD_TOKENS), output=Uniform(*LOAD_TOKENS))
CACHE_BYTES = 48 << 20  # some sixteen of these requests in bfloat16


def of_models(models: Iterable[str], kinds: Iterable[str]) -> list[str]:
    """Returns the names of rows that have a model each."""
    return [f"{model}: {kind}" for model, kind in itertools.product(models, kinds)]


# --- bytes ----------------------------------------------------------------------------------------


def bytes_held(results: Results, rows: Sequence[str]) -> None:
    """Counts bytes of a token, by the planner and in the arrays of an engine."""
    models = kinds.declared(kinds.REFERENCE)
    for name in rows:
        total = cost.cache_bytes(models[name], CONTEXTS[0])
        results.put("bytes", name, held=total, **_allocated(models[name], LENGTH))


def published_bytes(results: Results, rows: Sequence[str]) -> None:
    """Counts the same of a published model."""
    for name in rows:
        model = kinds.published()[name]
        total = cost.cache_bytes(model, CONTEXTS[0])
        results.put("published", name, held=total, **_allocated(model, 256))


def _narrow(model: ModelConfig) -> ModelConfig:
    """Returns a model with the same caches, and nothing else as wide."""
    return dataclasses.replace(model.with_kinds(width=64), width=64, vocab_size=256)


def _allocated(model: ModelConfig, context: int) -> Row:
    """Counts bytes of one sequence's pages."""
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


def quality(results: Results, rows: Sequence[str]) -> None:
    """Measures perplexity, and how often the likeliest token is that of the plain cache."""
    for name in dict.fromkeys(row.partition(": ")[0] for row in rows):
        resolved = resolve.resolve(name)
        checkpoint = resolved.open(None)
        tokenizer = checkpoint.load_tokenizer()
        tokens = tokenizer.encode(perplexity.default_text(), add_special=False)[:TOKENS]
        windows = perplexity.windows(tokens, perplexity.start(tokenizer), LENGTH)
        plain = None
        for kind, model in kinds.trained(resolved.config).items():
            if f"{name}: {kind}" not in rows and plain is not None:
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
    """Returns the log-probability of each token, and the likeliest one in its place."""
    scores = _engine(checkpoint, model, max_seqs=4, top_logprobs=1).score(windows)
    likeliest = [id for score in scores for top in score.top_logprobs for id in top]
    return [logprob for score in scores for logprob in score.logprobs], np.array(likeliest)


def _engine(checkpoint: Checkpoint, model: ModelConfig, **settings: Any) -> Engine:
    engine = EngineConfig.of(
        max_context=LENGTH, cache_bytes=1 << 30, decode_rows=(4,), prefill_chunks=(8,), **settings
    )
    return Engine.from_checkpoint(Config(model, engine), checkpoint)


def needles(results: Results, rows: Sequence[str]) -> None:
    """Asks for facts of a long text."""
    resolved = resolve.resolve(kinds.REFERENCE.name)
    checkpoint = resolved.open(None)
    tokenizer = checkpoint.load_tokenizer()
    facts = needle.needles(
        perplexity.default_text(), lambda text: tokenizer.encode(text, add_special=False),
        NEEDLE_TOKENS, NEEDLES, perplexity.start(tokenizer),
    )  # fmt: skip
    models = kinds.trained(resolved.config) | {kinds.SNAP: resolved.config}
    for kind in rows:
        budget = kinds.BUDGET if kind == kinds.SNAP else None
        # One after another, the last first: the others find what is before their facts cached.
        engine = _engine(checkpoint, models[kind], max_seqs=1, prompt_budgets=budget is not None)
        answers = engine.generate(
            [fact.prompt for fact in reversed(facts)],
            SamplingParams(max_new_tokens=8, prompt_budget=budget),
        )[::-1]
        hits = [fact.is_found(answer.text) for fact, answer in zip(facts, answers, strict=True)]
        results.put("needle", kind, found=hits)


# --- time -----------------------------------------------------------------------------------------


def seconds(results: Results, rows: Sequence[str]) -> None:
    """Times decode steps, each row's and those that it is compared with."""
    reference = dataclasses.replace(kinds.REFERENCE, max_context=2 * CONTEXTS[-1])
    models = kinds.timed(reference)
    hardware = machine.calibrated(reference)
    for name, (base, model) in models.items():
        if name not in rows and name not in {models[row][0] for row in rows}:
            continue
        values = params.init(decoder.param_infos(model), seed=1)
        figures: Row = {"beside": base, "predicted_s": {}, "measured_s": {}}
        for context in CONTEXTS:
            config = steps.sizes(Config(model, EngineConfig()), ROWS, context)
            step = steps.decode(Engine(config, values), context, hardware, REPEATS)
            figures["predicted_s"][f"{context}"] = step.predicted_s
            figures["measured_s"][f"{context}"] = step.measured_s
        results.put("time", name, **figures)


# --- requests at once -----------------------------------------------------------------------------


def batch(results: Results, rows: Sequence[str]) -> None:
    chip = dataclasses.replace(catalog.get("h100"), memory_bytes=MEMORY)
    for row in rows:
        name, _, kind = row.partition(": ")
        published, weights = PUBLISHED[name]
        model = kinds.declared(published)[kind]
        precision = dataclasses.replace(Precision.of(model), weights=FORMATS[weights])
        deployment = Deployment(model, chip, precision)
        sizes = {f"{length}": deployment.largest_batch(length) for length in LENGTHS}
        results.put("batch", row, sequences=sizes)


def overload(results: Results, rows: Sequence[str]) -> None:
    """Counts how many requests an engine runs at once in equal memory, of more than fit."""
    engine = EngineConfig.of(
        max_seqs=128, decode_rows=(128,), prefill_chunks=(4,), max_context=256, prefix_cache=False,
        cache_bytes=CACHE_BYTES, expected_tokens=LOAD.expected_tokens,
    )  # fmt: skip
    reference = _narrow(kinds.REFERENCE)
    load = requests.generate(LOAD, reference.vocab_size, LENGTH)
    for kind in rows:
        model = kinds.at_once(reference)[kind]
        values = params.init(decoder.param_infos(model), seed=1)
        figures = measure.figures(measure.measure(Engine(Config(model, engine), values), load, 1))
        names = "running_p50", "running_mean", "running_peak", "preemptions"
        results.put("overload", kind, **{name: figures[name] for name in names})
