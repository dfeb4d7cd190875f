"""Whether an adapter learns a small task, on weights in bfloat16 and of few bits.

    python -m scripts.reports.tuning

trains adapters of SmolLM2-135M on orders (`orders.py`), measures how often answers to held-out ones
are right to the character, with and without the adapter, and writes docs/results/tuning.md. An
adapter that is there already is not trained again.
"""

import datetime
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from inference.adapters import peft_directory
from inference.engine import Engine
from inference.files import cache_directory, local_machine, user_files
from inference.request import SamplingParams
from layers import params
from scripts.reports.pages.markdown import code, prose, table
from scripts.reports.tuning import orders
from scripts.reports.tuning.orders import Order

_PAGE = Path(__file__).resolve().parents[3] / "docs" / "results" / "tuning.md"
_MODEL, _RANK = "smollm2-135m", 16
_BASES = "bfloat16", "int8", "int4"
_INTERRUPTED = "int4"  # is trained again, and interrupted
_NUM_TRAINED, _NUM_HELD_OUT = 1200, 200
_ROWS, _MAX_TOKENS = 32, 32
_EVERY = 15  # steps between checkpoints
_SETTINGS = (
    *(f"training.lora_rank={_RANK}", "training.learning_rate=2e-3", "training.steps=30"),
    *("training.warmup_steps=3", "training.batch=2", "training.accumulate=1"),
    *("training.window=256", f"training.checkpoint_every={_EVERY}"),
)


class Training(NamedTuple):
    """What a training left, and what it printed."""

    adapter: Path
    figures: dict[str, Any]


class Answers(NamedTuple):
    """Right answers without and with the adapter, the first of each, and bytes of the weights."""

    before: int
    after: int
    examples: tuple[str, str]
    num_bytes: int


def main() -> None:
    """Trains, asks and writes the page."""
    held_out = orders.orders(_NUM_HELD_OUT, is_held_out=True)
    folder, rows = cache_directory.trained("tuning"), []
    folder.mkdir(parents=True, exist_ok=True)
    lines = [order.line for order in orders.orders(_NUM_TRAINED, is_held_out=False)]
    user_files.write({folder / "orders.jsonl": "".join(lines).encode()})
    for base in _BASES:
        training = _trained(folder, base)
        answers = _answers(base, training.adapter, held_out)
        rows.append(_row(base, training, answers))
        print(*rows[-1], sep="  ", flush=True)
    is_same = _weights(_resumed(folder, _INTERRUPTED)) == _weights(folder / _INTERRUPTED)
    assert is_same, "an interrupted training has other bits"
    when = f"{datetime.date.today()}, {local_machine.name()}, Python {sys.version.split()[0]}"
    page = _page(rows, when, held_out[0], answers)
    user_files.write({_PAGE: page.encode()})


def _command(folder: Path, base: str, output: str) -> list[str]:
    weights = [] if base == "bfloat16" else [f"--weights={base}"]
    return [
        *("-m", "scripts.train", "--task=sft", f"--model={_MODEL}", *weights),
        *(f"--data={folder / 'orders.jsonl'}", f"--output={folder / output}", "--json"),
        *(f"--set={setting}" for setting in _SETTINGS),
    ]


def _trained(folder: Path, base: str) -> Training:
    path = folder / f"{base}.json"
    if not path.exists():
        started = time.perf_counter()
        command = [sys.executable, *_command(folder, base, base)]
        ran = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        figures = {**json.loads(ran.stdout), "seconds": time.perf_counter() - started}
        user_files.write({path: json.dumps(figures).encode()})
    return Training(folder / base, json.loads(path.read_text("utf-8")))


def _resumed(folder: Path, base: str) -> Path:
    """Trains again, interrupted behind the first checkpoint, and goes on; returns the adapter."""
    output = f"{base}-again"
    for path in folder.glob(f"{output}*"):
        shutil.rmtree(path)
    command = [sys.executable, *_command(folder, base, output)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as training:
        assert training.stderr is not None
        for line in training.stderr:
            sys.stderr.buffer.write(line)
            if line.startswith(f"step {_EVERY} ".encode()):
                training.terminate()
    assert training.returncode == 1, "it was not interrupted"
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / output


def _weights(adapter: Path) -> bytes:
    return (adapter / peft_directory.WEIGHTS).read_bytes()


def _answers(base: str, adapter: Path, held_out: Sequence[Order]) -> Answers:
    engine = Engine.from_model(_MODEL, weights=base, max_seqs=_ROWS, slots=1, rank=_RANK)
    engine.adapters.load("orders", adapter)
    assert engine.tokenizer is not None
    prompts = [engine.tokenizer.apply_chat_template(order.prompt) for order in held_out]
    both = [
        [output.text for output in engine.generate(prompts, SamplingParams(
            max_new_tokens=_MAX_TOKENS, adapter=name,
        ))]
        for name in (None, "orders")
    ]  # fmt: skip
    before, after = (
        sum(text == order.answer for text, order in zip(texts, held_out, strict=True))
        for texts in both
    )
    num_bytes = params.num_bytes(engine.config.model.parameters())
    return Answers(before, after, (both[0][0], both[1][0]), num_bytes)


def _row(base: str, training: Training, answers: Answers) -> list[str]:
    figures = training.figures
    return [
        base, f"{answers.num_bytes / 1e6:.0f}", _share(answers.before), _share(answers.after),
        f"{figures['first_loss']:.2f} to {figures['loss']:.4f}", f"{figures['seconds'] / 60:.1f}",
        f"{figures['tokens'] / figures['steps'] / figures['step_s']:.0f}",
    ]  # fmt: skip


def _share(right: int) -> str:
    return f"{right} ({right / _NUM_HELD_OUT:.1%})"


def _page(rows: Sequence[Sequence[str]], when: str, example: Order, answers: Answers) -> str:
    columns = (
        "weights below the adapter", "MB", "right without the adapter", "right with it",
        "loss, nats a token", "minutes of training", "tokens/s",
    )  # fmt: skip
    command = _command(Path(), "int4", "orders-int4")
    before, after = (json.dumps(text) for text in answers.examples)
    lines = [
        "# Tuning",
        *prose(
            f"{when}. Written by `python -m scripts.reports.tuning`, which trains LoRA adapters "
            f"of rank {_RANK} on {_NUM_TRAINED} orders, above the weights of SmolLM2-135M-Instruct "
            "as they are and in few bits (QLoRA, Dettmers et al. 2023, arXiv 2305.14314):"
        ),
        *code(" ".join(["python", *command])),
        *prose(
            f'The system message of an order is "{orders.INSTRUCTION}". Numbers, names, goods '
            f"and beginnings of cities of the {_NUM_HELD_OUT} held-out orders are in none of the "
            "trained ones. The first of them, its answer, and what the model writes without the "
            f"adapter and with it, on weights in {rows[-1][0]}:"
        ),
        *code(example.text, example.answer, before, after),
        *prose(
            "An answer is right if it is that text to the character. All are greedy, from engines "
            f"with {_ROWS} rows that hold the weights in the same format, with activations as by "
            "default. The preset's file has most weights in blocks of four bits (q4_1), which "
            "bfloat16 holds dequantized and int8 and int4 round once more. Minutes are a whole "
            "command with its compilation."
        ),
        *table(columns, rows),
        *prose(
            f"The training on weights in {_INTERRUPTED}, interrupted behind step {_EVERY} and "
            "continued by the same command, wrote the same bytes."
        ),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
