"""What drafts gain on the machine at hand, measured in pairs with plain decoding, and what the
planner predicts for others.

    python -m scripts.reports.speculation

writes the table of docs/speculation.md. It needs `make small-model` and the heads of
`python -m scripts.train --task=eagle --model=smollm2-135m` (and `--task=medusa`); a case whose
draft is missing is left out.
"""

import dataclasses
import datetime
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from configs.engine import Config, EngineConfig
from configs.hardware import catalog
from configs.hardware.spec import HardwareSpec
from configs.heads import Heads
from configs.model import ModelConfig
from inference.checkpoints import resolve
from inference.engine import Engine
from inference.files import cache_directory, local_machine
from inference.planner.deployment import Deployment
from inference.planner.speculation import Speculation
from inference.request import SamplingParams
from inference.speculation import draft_tree
from inference.text.tokenizer import Tokenizer
from layers import params as parameters
from scripts.reports.pages.markdown import fill, table

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "speculation.md"
_PAIRS = 3
_K = 4
_TREE = 31
_BATCH, _BATCH_PAIRS, _IN_BATCHES = 32, 8, ("questions, EAGLE heads",)
_CHIPS = ("h100", "v5e")
_TRAINED = cache_directory.path() / "trained"

_TEXT = (
    "The lighthouse keeper climbed the stairs every evening at dusk to light the lamp. He had done "
    "so for thirty years, and he knew each of the two hundred steps by its sound. From the gallery "
    "he could see the harbour, the fishing boats coming home, and beyond them the long grey line "
    "of the sea. On clear nights he counted the stars; on foggy nights he listened to the bell. "
    "In the morning he wrote the weather into a book, slept until noon, and mended his nets."
)
_QUESTIONS = (
    "What is gravity?", "Give me three tips for learning a language.",
    "Write a short story about a fox.", "How does a refrigerator work?",
    "Explain what a prime number is.", "What should I pack for a week in the mountains?",
    "Describe the life cycle of a butterfly.", "Why is the sky blue?",
)  # fmt: skip
_CODE = (
    "def read_lines(path):\n    ", "class Stack:\n    def __init__(self):\n        ",
    "import os\nimport sys\n\n", "    def close(self):\n        ",
    "    for name in names:\n        if ", "try:\n    import ", "    raise ValueError(",
    "def main():\n    parser = ",
)  # fmt: skip


class Case(NamedTuple):
    """A model, what drafts for it, and its prompts."""

    name: str
    model: str
    proposer: str
    draft: Path | None
    prompts: Callable[[Tokenizer], list[list[int]]]
    num_tokens: int
    temperature: float = 0.0
    num_drafts: int = _K
    is_tree: bool = False


def main() -> None:
    """Measures every case that can be, and writes the page."""
    small = str(_TRAINED / "small")
    cases = [
        Case("a text with one change, n-grams", "smollm2-135m", "ngram", None, _copies, 96),
        *(
            Case(f"questions, {name} heads{label}", "smollm2-135m", kind,
                 _TRAINED / f"smollm2-135m-{kind}", _chats, 128, temperature, num_drafts, is_tree)
            for kind, name in (("eagle", "EAGLE"), ("medusa", "Medusa"))
            for label, temperature, num_drafts, is_tree in (
                ("", 0.0, _K, False), (", temperature 0.7", 0.7, _K, False),
                (f", tree of {_TREE}", 0.0, _TREE, True),
                (f", tree of {_TREE}, temperature 0.7", 0.7, _TREE, True),
            )
        ),
        Case("code, the small model and its draft", small, "draft", _TRAINED / "small-draft",
             _codes, 128),
    ]  # fmt: skip
    cases = [case for case in cases if case.draft is None or case.draft.is_dir()]
    rows = [_measure(case) for case in cases]
    _write(rows, [_measure_batch(case) for case in cases if case.name in _IN_BATCHES])


def _seconds(engine: Engine, run: Callable[[], object]) -> float:
    """Times a run, without what it compiles."""
    started, compiled = time.perf_counter(), engine.compile_s
    run()
    return time.perf_counter() - started - (engine.compile_s - compiled)


def _measure(case: Case) -> list[str]:
    """Measures answers one at a time; a row of the table."""
    print(case.name, file=sys.stderr, flush=True)
    plain, drafting = _engine(case, False), _engine(case, True)
    assert plain.tokenizer is not None
    prompts = case.prompts(plain.tokenizer)
    params = [
        SamplingParams(
            max_new_tokens=case.num_tokens, temperature=case.temperature, seed=nth, ignore_eos=True
        )
        for nth in range(len(prompts))
    ]

    def answer(engine: Engine) -> tuple[float, list[list[int]]]:
        answers: list[list[int]] = []

        def run() -> None:
            for prompt, sampling in zip(prompts, params, strict=True):
                answers.append(engine.generate([prompt], sampling)[0].token_ids)

        return _seconds(engine, run), answers

    for engine in (plain, drafting):
        answer(engine)
    before = dataclasses.replace(drafting.scheduler.counters)
    before.verified = before.verified.copy()
    drafting.records.clear()
    plain.records.clear()
    ratios, same = [], []
    for _ in range(_PAIRS):
        plain_s, expected = answer(plain)
        drafting_s, answers = answer(drafting)
        ratios.append(plain_s / drafting_s)
        same += [a == b for a, b in zip(expected, answers, strict=True)]
    counters = drafting.scheduler.counters
    counters.verified.subtract(before.verified)
    num_drafts = counters.num_drafts - before.num_drafts
    acceptance = " ".join(f"{rate:.2f}" for rate in counters.acceptance)
    tokens = 1 + counters.num_accepted / (counters.num_passes - before.num_passes)
    narrow, wide = _step_s(plain, 1), _step_s(drafting, 1 + case.num_drafts)
    predicted = [_predict(case, plain, drafting, catalog.get(chip), tokens) for chip in _CHIPS]
    return [
        case.name, f"{counters.num_accepted} of {num_drafts}", acceptance,
        f"{tokens:.2f}", f"{wide / narrow:.2f}", f"{tokens * narrow / wide:.2f}",
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        *(f"{ratio:.2f}" for ratio in predicted), f"{sum(same)} of {len(same)}",
    ]  # fmt: skip


def _measure_batch(case: Case) -> str:
    """Measures a whole batch, where the number of drafts adapts; a sentence."""
    plain, drafting = (_engine(case, drafts, _BATCH) for drafts in (False, True))
    assert plain.tokenizer is not None
    texts = case.prompts(plain.tokenizer)
    prompts = [texts[nth % len(texts)] for nth in range(_BATCH)]
    params = [
        SamplingParams(max_new_tokens=case.num_tokens, temperature=0.7, seed=n, ignore_eos=True)
        for n in range(_BATCH)
    ]

    def seconds(engine: Engine) -> float:
        return _seconds(engine, lambda: engine.generate(prompts, params))

    for engine in (plain, drafting):
        seconds(engine)
    ratios = [seconds(plain) / seconds(drafting) for _ in range(_BATCH_PAIRS)]
    # Student's t of 7 degrees of freedom, 5 % above.
    mean, spread = statistics.mean(ratios), 1.895 * statistics.stdev(ratios) / _BATCH_PAIRS**0.5
    first = drafting.scheduler.counters.acceptance[0]
    return (
        f"{_BATCH} answers at once, {case.name}, temperature 0.7, k adapts (of first drafts "
        f"{first:.2f} are right): {mean:.2f} times plain decoding's speed, 90 % interval "
        f"{mean - spread:.3f} to {mean + spread:.3f}, {_BATCH_PAIRS} pairs in turns."
    )


def _engine(case: Case, drafts: bool, seqs: int = 1) -> Engine:
    resolved, draft = resolve.resolve(case.model), None
    engine = EngineConfig.of(
        max_seqs=seqs, max_context=512, decode_rows=(seqs,), prefix_cache=False
    )
    if drafts:
        engine = engine.replace(
            proposer=case.proposer, num_drafts=case.num_drafts, adapt_drafts=seqs > 1
        )
        draft = resolve.resolve(str(case.draft), drafts=True) if case.draft else None
    if draft is None:
        return Engine.from_checkpoint(Config(resolved.config, engine), resolved.open(None))
    if case.is_tree:
        assert isinstance(draft.config, Heads)
        tree = draft_tree.settings(draft.config, case.num_drafts)
        engine = engine.replace(**tree)
    draft_config = dataclasses.replace(draft.config, dtype=resolved.config.dtype)
    config = Config(resolved.config, engine, draft=draft_config)
    return Engine.from_checkpoint(config, resolved.open(None), draft=draft.open(None))


def _step_s(engine: Engine, width: int) -> float:
    """Returns median seconds of steps of one decode row."""
    return statistics.median(
        record.seconds
        for record in engine.records
        if record.shape.decode == (1, width) and not record.shape.prefill[0]
    )


def _predict(
    case: Case, plain: Engine, drafting: Engine, chip: HardwareSpec, tokens: float
) -> float:
    """Predicts the speedup over plain decoding on a chip, given the tokens of a pass."""
    model, draft = plain.config.model, drafting.config.draft
    size = 0.0 if draft is None else _num_bytes(draft) / _num_bytes(model)
    cost = 0.0 if case.proposer in ("ngram", "medusa") else size
    runs = drafting.config.engine.drafts.levels / case.num_drafts  # a tree's are of whole levels
    speculation = Speculation(case.num_drafts, 0.5, cost * runs, size)
    plain_s, drafting_s = (
        Deployment(model, chip, speculation=drafts).step_seconds(1, 256)
        for drafts in (None, speculation)
    )
    return tokens * plain_s / drafting_s


def _num_bytes(model: ModelConfig) -> int:
    return parameters.num_bytes(model.parameters())


def _chat(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.apply_chat_template([{"role": "user", "content": text}])


def _copies(tokenizer: Tokenizer) -> list[list[int]]:
    task = "Rewrite this text, with 'sixty years' in place of 'thirty years':"
    return [_chat(tokenizer, f"{task}\n\n{_TEXT}")]


def _chats(tokenizer: Tokenizer) -> list[list[int]]:
    return [_chat(tokenizer, question) for question in _QUESTIONS]


def _codes(tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode(text) for text in _CODE]


def _write(rows: Sequence[Sequence[str]], batches: Sequence[str]) -> None:
    columns = (
        "task", "drafts accepted", "1st, 2nd, ... accepted", "tokens a pass", "wide step / plain",
        "so predicted", "measured (of 3 pairs)", "H100, planned", "v5e, planned", "same answers",
    )  # fmt: skip
    when = f"Measured {datetime.date.today()}, {local_machine.name()}."
    block = [when, *table(columns, rows), *("", *batches)]
    _PAGE.write_text(fill(_PAGE.read_text("utf-8"), {"measured": block}), "utf-8")


if __name__ == "__main__":
    main()
