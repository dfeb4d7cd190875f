"""Thoughts in the text of answers, and in their tokens."""

import json
import re
from pathlib import Path

import pytest

from inference.text import layouts
from inference.text.thoughts import MARKS, THINK, Progress, Stage, ThoughtReader
from tests.inference.server.fake_engine import tokenizer

TEMPLATES = json.loads(
    (Path(__file__).parents[2] / "golden" / "chat-templates" / "expected.json").read_text("utf-8")
)["families"]
TEXTS = [
    "<think>\nTwo and two.\n</think>\n\nFour.", "<think></think>4", "<think>\n\n</think>\n\n4",
    "\n <think> a </think> b </think> c", "No thought.", "", " ", "<", "<thin", "<think", "<think>",
    "<think>cut off", "<think>cut off \n", "<think>almost </thin", "<think>a < b </ c</think>\n<d>",
    "<thinker>no</thinker>", "Well: <think>later</think> on", "<think>ü東</think>🙂",
    "<think>a</think><think>b</think>c", "<think>\n\n  x  y\n\nz  </think>  ", "</think>alone",
    "<think>a</think>\n", "<think>a\n</think", "  leading", "<think>a</Think></think>b",
    "<think><think>a</think>b",
]  # fmt: skip


def read(text: str, *pieces: str, marks=THINK, stage=Stage.BEFORE) -> tuple[str, str]:
    reader = ThoughtReader(marks, stage)
    found = [part for piece in pieces or (text,) for part in reader.push(piece)] + reader.finish()
    thought = "".join(part.text for part in found if part.is_thought)
    return thought, "".join(part.text for part in found if not part.is_thought)


def expected(text: str, marks=THINK, stage=Stage.BEFORE) -> tuple[str, str]:
    """By regular expressions over the whole text."""
    opening, closing = re.escape(marks.opening), re.escape(marks.closing)
    start = {"before": rf"\s*{opening}", "within": "", "behind": "(?!)"}[stage.value]
    if match := re.fullmatch(rf"{start}(.*?){closing}(.*)", text, re.DOTALL):
        return match[1].strip(), match[2].lstrip()
    if match := re.fullmatch(rf"{start}(.*)", text, re.DOTALL):
        return match[1].strip(), ""
    return "", text if stage is Stage.BEFORE else text.lstrip()


@pytest.mark.parametrize("marks", MARKS, ids=lambda marks: marks.opening)
@pytest.mark.parametrize("stage", [Stage.BEFORE, Stage.WITHIN])
@pytest.mark.parametrize("text", TEXTS)
def test_it_is_divided_wherever_it_is_cut(text, stage, marks):
    text = text.replace("<think>", marks.opening).replace("</think>", marks.closing)
    due = expected(text, marks, stage)
    assert read(text, marks=marks, stage=stage) == due
    assert read(text, *text, marks=marks, stage=stage) == due
    for at in range(len(text)):
        assert read(text, text[:at], text[at:], marks=marks, stage=stage) == due


@pytest.mark.parametrize("stage", [Stage.BEFORE, Stage.WITHIN])
def test_many_blanks_take_linear_time(stage):
    """Otherwise this takes more than a test may."""
    blanks = " " * 500_000
    due = ("", blanks + "a") if stage is Stage.BEFORE else (f"a{blanks}b", "")
    text = due[0] + due[1]
    assert read(text, *text, stage=stage) == due


@pytest.mark.parametrize("prompt, stage", [
    ("Hi<think>", Stage.WITHIN), ("Hi<think>\n", Stage.WITHIN), ("Hi", Stage.BEFORE),
    ("<think>\n\n</think>\n\n", Stage.BEHIND), ("<think>a", Stage.BEFORE), ("", Stage.BEFORE),
])  # fmt: skip
def test_how_a_prompt_begins_the_answer(prompt, stage):
    known = tokenizer()
    assert THINK.stage_after(known, known.encode(prompt)) is stage


@pytest.mark.parametrize("message, stage", [
    ("Hi", Stage.BEHIND), ("<think>a", Stage.WITHIN), ("<think>a</think>b", Stage.BEHIND),
    ("<think>a</think>b<think>c", Stage.WITHIN), ("</think>", Stage.BEHIND),
])  # fmt: skip
def test_how_a_message_goes_on(message, stage):
    assert THINK.stage_within(message) is stage


def test_blanks_are_the_same_to_text_and_tokens():
    for blank, stage in (("\n", Stage.WITHIN), ("\v", Stage.BEHIND)):
        progress = Progress(THINK, Stage.BEFORE)
        progress.accept(f"{blank}<think>a".encode())
        assert progress.stage is stage
        assert bool(read("", f"{blank}<think>a")[0]) is (stage is Stage.WITHIN)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 30])
@pytest.mark.parametrize("thought", ["", "a", "abc</th", "ü" * 9, "a" * 31])
def test_tokens_of_a_thought_are_counted(thought, size):
    """Of so many bytes each; the marks are tokens of their own, as in models that think."""
    cut = [thought.encode()[at : at + size] for at in range(0, len(thought.encode()), size)]
    progress = Progress(THINK, Stage.BEFORE)
    for token in (b"\n", b"<think>", *cut):
        progress.accept(token)
    assert progress.stage is Stage.WITHIN and progress.num_tokens == len(cut)
    for token in (b"</think>", b"\n\n", b"Four"):
        progress.accept(token)
    assert progress.stage is Stage.BEHIND and progress.num_tokens == len(cut)
    progress.reset()
    for byte in b"<think>" + thought.encode() + b"</think>x":
        progress.accept(bytes([byte]))
    assert progress.stage is Stage.BEHIND and progress.num_tokens == len(thought.encode())


def test_templates_know_their_marks():
    known = {name: layouts.of_template(family["template"]) for name, family in TEMPLATES.items()}
    assert known["qwen"] == THINK and known["llama3"] is None
    assert layouts.of_template(None) is None
    assert layouts.of_template("[THINK]{{ a }}[/THINK]") == MARKS[1]
