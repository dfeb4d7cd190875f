"""What drafts gain on the machine at hand, measured in pairs with plain decoding, beside what the
planner says of others.

    python -m scripts.reports.speculation

rewrites what docs/speculation.md says under "Measured". It needs `make small-model` and the heads
of `python -m scripts.train --task=eagle --model=smollm2-135m` (and `--task=medusa`); what is not
there is left out.
"""

import dataclasses
import datetime
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from configs.engine import Config, EngineConfig
from configs.hardware import catalog
from inference.checkpoints import resolve
from inference.engine import Engine
from inference.files import cache_directory
from inference.planner.deployment import Deployment
from inference.planner.speculation import Speculation
from inference.request import SamplingParams
from inference.speculation import draft_tree
from layers import params as parameters

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "speculation.md"
_BEGIN = "<!-- written by scripts.reports.speculation -->"
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
    """What is measured: who drafts for whom, and on which prompts."""

    name: str
    model: str
    proposer: str
    draft: Path | None
    prompts: Callable[[Any], list[list[int]]]
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
                 _TRAINED / f"smollm2-135m-{kind}", _chats, 128, *more)
            for kind, name in (("eagle", "EAGLE"), ("medusa", "Medusa"))
            for label, more in (
                ("", (0.0,)), (", temperature 0.7", (0.7,)),
                (f", tree of {_TREE}", (0.0, _TREE, True)),
                (f", tree of {_TREE}, temperature 0.7", (0.7, _TREE, True)),
            )
        ),
        Case("code, the small model and its draft", small, "draft", _TRAINED / "small-draft",
             _codes, 128),
    ]  # fmt: skip
    there = [case for case in cases if case.draft is None or case.draft.is_dir()]
    rows = [_measured(case) for case in there]
    batches = [_adapted(case) for case in there if case.name in _IN_BATCHES]
    _write(rows, batches, _processor())


def _measured(case: Case) -> list[str]:
    """A row of the table."""
    print(case.name, file=sys.stderr, flush=True)
    plain, drafting = _engine(case, False), _engine(case, True)
    tokenizer = plain.tokenizer
    prompts = case.prompts(tokenizer)
    params = [
        SamplingParams(
            max_new_tokens=case.num_tokens, temperature=case.temperature, seed=nth, ignore_eos=True
        )
        for nth in range(len(prompts))
    ]

    def seconds(engine: Engine) -> tuple[float, list[list[int]]]:
        started, compiled = time.perf_counter(), engine.compile_s
        found = [
            engine.generate([prompt], own)[0].token_ids
            for prompt, own in zip(prompts, params, strict=True)
        ]
        return time.perf_counter() - started - (engine.compile_s - compiled), found

    for engine in (plain, drafting):
        seconds(engine)
    before = dataclasses.replace(drafting.scheduler.counters)
    before.verified = before.verified.copy()
    drafting.records.clear()
    plain.records.clear()
    ratios, same = [], []
    for _ in range(_PAIRS):
        alone, expected = seconds(plain)
        helped, found = seconds(drafting)
        ratios.append(alone / helped)
        same += [a == b for a, b in zip(expected, found, strict=True)]
    counters = drafting.scheduler.counters
    counters.verified.subtract(before.verified)
    passes = counters.num_passes - before.num_passes
    gained = 1 + counters.num_accepted / passes
    narrow, wide = _step(plain, 1), _step(drafting, 1 + case.num_drafts)
    predicted = [_predicted(case, plain, drafting, catalog.get(chip), gained) for chip in _CHIPS]
    num_drafts = counters.num_drafts - before.num_drafts
    acceptance = " ".join(f"{rate:.2f}" for rate in counters.acceptance)
    return [
        case.name, f"{counters.num_accepted} of {num_drafts}", acceptance,
        f"{gained:.2f}", f"{wide / narrow:.2f}", f"{gained * narrow / wide:.2f}",
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        *(f"{ratio:.2f}" for ratio in predicted), f"{sum(same)} of {len(same)}",
    ]  # fmt: skip


def _adapted(case: Case) -> str:
    """What is said of a whole batch, where the number of drafts adapts."""
    plain, drafting = (_engine(case, drafts, _BATCH) for drafts in (False, True))
    prompts = case.prompts(plain.tokenizer)
    prompts = [prompts[nth % len(prompts)] for nth in range(_BATCH)]
    params = [
        SamplingParams(max_new_tokens=case.num_tokens, temperature=0.7, seed=n, ignore_eos=True)
        for n in range(_BATCH)
    ]

    def seconds(engine: Engine) -> float:
        started, compiled = time.perf_counter(), engine.compile_s
        engine.generate(prompts, params)
        return time.perf_counter() - started - (engine.compile_s - compiled)

    for engine in (plain, drafting):
        seconds(engine)
    ratios = [seconds(plain) / seconds(drafting) for _ in range(_BATCH_PAIRS)]
    # Student's t of 7 degrees of freedom, 5 % above.
    spread = 1.895 * statistics.stdev(ratios) / _BATCH_PAIRS**0.5
    first = drafting.scheduler.counters.acceptance[0]
    return (
        f"{_BATCH} answers at once, {case.name}, temperature 0.7, k adapts (of first drafts "
        f"{first:.2f} are right): {statistics.mean(ratios):.2f} times plain decoding's speed, "
        f"90 % interval {statistics.mean(ratios) - spread:.3f} to "
        f"{statistics.mean(ratios) + spread:.3f}, {_BATCH_PAIRS} pairs in turns."
    )


def _engine(case: Case, drafts: bool, seqs: int = 1) -> Engine:
    resolved = resolve.resolve(case.model)
    engine = EngineConfig.of(
        max_seqs=seqs, max_context=512, decode_rows=(seqs,), prefix_cache=False
    )
    config = Config(resolved.config, engine)
    draft = None
    if drafts:
        if case.draft is not None:
            draft = resolve.resolve(str(case.draft), drafts=True)
        tree = draft_tree.settings(draft.config, case.num_drafts) if case.is_tree else {}
        engine = engine.replace(
            proposer=case.proposer, num_drafts=case.num_drafts, adapt_drafts=seqs > 1, **tree
        )
        own = draft and dataclasses.replace(draft.config, dtype=resolved.config.dtype)
        config = dataclasses.replace(config, engine=engine, draft=own)
    return Engine.from_checkpoint(config, resolved.open(None), draft=draft and draft.open(None))


def _step(engine: Engine, width: int) -> float:
    """Median seconds of steps of one decode row."""
    return statistics.median(
        record.seconds
        for record in engine.records
        if record.shape.decode == (1, width) and not record.shape.prefill[0]
    )


def _predicted(case: Case, plain: Engine, drafting: Engine, chip: Any, gained: float) -> float:
    """Speed over plain decoding that the planner sees on a chip, given the tokens a pass."""
    model, draft = plain.config.model, drafting.config.draft
    size = 0.0
    if draft is not None:
        own, target = (parameters.num_bytes(each.parameters()) for each in (draft, model))
        size = own / target
    cost = 0.0 if case.proposer in ("ngram", "medusa") else size
    alone = Deployment(model, chip)
    runs = drafting.config.engine.drafts.levels / case.num_drafts  # a tree's are of whole levels
    helped = Deployment(
        model, chip, speculation=Speculation(case.num_drafts, 0.5, cost * runs, size)
    )
    return gained * alone.step_seconds(1, 256) / helped.step_seconds(1, 256)


def _copies(tokenizer: Any) -> list[list[int]]:
    asked = f"Rewrite this text, with 'sixty years' in place of 'thirty years':\n\n{_TEXT}"
    return [tokenizer.apply_chat_template([{"role": "user", "content": asked}])]


def _chats(tokenizer: Any) -> list[list[int]]:
    return [tokenizer.apply_chat_template([{"role": "user", "content": q}]) for q in _QUESTIONS]


def _codes(tokenizer: Any) -> list[list[int]]:
    return [tokenizer.encode(text) for text in _CODE]


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "an unnamed processor"


def _write(rows: Sequence[Sequence[str]], batches: Sequence[str], machine: str) -> None:
    head = [
        "task", "drafts accepted", "1st, 2nd, ... accepted", "tokens a pass", "wide step / plain",
        "so predicted", "measured (of 3 pairs)", "H100, planned", "v5e, planned", "same answers",
    ]  # fmt: skip
    table = [head, ["---"] * len(head), *rows]
    lines = [
        _BEGIN, "",
        f"{datetime.date.today()}, 2 cores of {machine}; one answer at a time, k = {_K} or a tree; "
        "tokens a second of whole answers over plain decoding's, medians of three pairs. A wide "
        "step drafts and verifies; the planner's figures take the tokens a pass from here.", "",
        *("| " + " | ".join(row) + " |" for row in table), "", *batches, "",
    ]  # fmt: skip
    before = _PAGE.read_text().partition(_BEGIN)[0]
    _PAGE.write_text(before + "\n".join(lines))


if __name__ == "__main__":
    main()
