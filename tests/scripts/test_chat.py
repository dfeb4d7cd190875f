"""`python -m scripts.chat`: what is typed, what is said, and how each of them ends."""

import builtins
import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
import types
from collections import deque

import pytest

from configs.engine import EngineConfig
from inference.checkpoints import tokenizer_files
from inference.outputs import RequestOutput
from inference.scheduling.step_schedule import Counters
from scripts import chat, common
from scripts.reports import costs
from tests import compiling
from tests.scripts import apps

_SETTINGS = (
    f"--model={apps.TINY}",
    "--set=model.dtype=float32",
    "--set=engine.shapes.prefill_chunks=(1,)",
    "--set=engine.shapes.decode_rows=(2,)",
)


@pytest.fixture(scope="module")
def tiny():
    return tokenizer_files.load_tokenizer(apps.TINY, 320)


# The program, with an engine that says what it is told to say.


class Scripted:
    """Answers in order; each is a list of texts, then a reason or an exception."""

    def __init__(self, *answers):
        self.answers = deque(answers)
        self.records: list = []
        self.compile_s, self.is_compiling = 0.0, False
        self.scheduler = types.SimpleNamespace(counters=Counters())
        self.config = types.SimpleNamespace(engine=EngineConfig())
        self.asked: list[list[int]] = []
        self.closed = 0

    def stream(self, ids, params):
        self.asked.append(ids)
        *texts, reason = self.answers.popleft()
        try:
            for text in texts:
                if text == "^C":
                    os.kill(os.getpid(), signal.SIGINT)
                    text = ""
                yield RequestOutput(1, [5], text, None)
            if isinstance(reason, Exception):
                raise reason
            yield RequestOutput(1, [], "", reason)
        finally:
            self.closed += 1


@pytest.fixture
def talk(monkeypatch, capfd):
    def run(engine, typed: str | bytes, *args: str) -> apps.Ran:
        data = typed.encode() if isinstance(typed, str) else typed
        monkeypatch.setattr(common, "load_engine", lambda *args, **more: engine)
        monkeypatch.setattr(costs, "stats", lambda engine, *took: took)
        monkeypatch.setattr(
            costs, "summary", lambda took: f"took {took[0], took[1]['output_tokens']}"
        )
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        return apps.call(chat, monkeypatch, capfd, f"--model={apps.TINY}", *args)

    return run


def decoded(tiny, engine):
    return [tiny.decode(ids, skip_special=False).removeprefix("<|begin|>") for ids in engine.asked]


def test_turns_and_commands(talk, tiny, tmp_path):
    engine = Scripted(["He", "llo", "stop"], ["Two", "stop"], ["Three", "length"])
    saved = tmp_path / "saved.jsonl"
    ran = talk(engine, f"Hi\n\n/stats\nmore \\\nlines\n/save {saved}\n/help\n/system S\n/reset\n"
               "last\n/stats\n/quit\nnever\n", "--max_new_tokens=7")  # fmt: skip
    assert (ran.status, ran.out) == (0, "Hello\nTwo\nThree\n")
    assert decoded(tiny, engine) == [
        "[user]\nHi<|end_of_turn|>\n[assistant]\n",
        "[user]\nHi<|end_of_turn|>\n[assistant]\nHello<|end_of_turn|>\n"
        "[user]\nmore \nlines<|end_of_turn|>\n[assistant]\n",
        "[system]\nS<|end_of_turn|>\n[user]\nlast<|end_of_turn|>\n[assistant]\n",
    ]
    assert len(json.loads(saved.read_text())["messages"]) == 4
    first = len(engine.asked[0]) + 2
    said = ran.err.splitlines()
    assert said[0] == f"2 messages, {first} tokens of a context of 256"
    assert said[1] == f"took {(len(engine.asked[0]), 2)}"
    assert f"4 messages are in {saved}" in said
    assert "(cut off at --max_new_tokens=7)" in said
    assert engine.closed == 3


def test_a_message_may_begin_with_a_slash(talk, tiny):
    engine = Scripted(["One", "stop"])
    assert talk(engine, "//tmp is full\n").out == "One\n"
    assert "[user]\n/tmp is full<|" in decoded(tiny, engine)[0]


def test_an_interrupt_forgets_a_message_half_typed(monkeypatch, capsys):
    typed = deque(["half \\", KeyboardInterrupt, "whole", "again \\", EOFError])

    def type_in(prompt):
        key = typed.popleft()
        if isinstance(key, str):
            return key
        raise key

    terminal = types.SimpleNamespace(isatty=lambda: True, reconfigure=lambda errors: None)
    monkeypatch.setattr(sys, "stdin", terminal)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(builtins, "input", type_in)
    assert list(chat._lines()) == ["whole", "again \n"]
    typed.extend([KeyboardInterrupt, "never"])
    assert list(chat._lines()) == []


def test_no_input_at_all_is_one_line(monkeypatch, capfd):
    monkeypatch.setattr(sys, "stdin", None)  # chat <&-
    assert "stdin is closed" in apps.call(chat, monkeypatch, capfd).error


def test_the_template_is_a_choice(talk, tiny):
    engine = Scripted(["One", "stop"])
    assert talk(engine, "a\n", "--template=default").out == "One\n"
    assert "no chat template 'rag'; valid: default" in talk(engine, "a\n", "--template=rag").error


def test_an_interrupt_ends_the_answer_only(talk, tiny):
    engine = Scripted(["One", "^C", "never", "stop"], ["^C", "never", "stop"], ["Two", "stop"])
    ran = talk(engine, "a\nb\nc\n", "--system=S")
    assert (ran.status, ran.out) == (0, "One\nTwo\n")
    assert ran.err.splitlines() == [
        "(stopped: what was said stays)",
        "(stopped before the first word: the message was not kept)",
    ]
    assert engine.closed == 3 and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    last = decoded(tiny, engine)[-1]
    assert last.startswith("[system]\nS<|end_of_turn|>\n[user]\na<|end_of_turn|>\n[assistant]\nOne")
    assert "[user]\nb" not in last


def test_an_ignored_interrupt_stays_ignored(talk):
    """A shell starts its jobs in the background so."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        ran = talk(Scripted(["One", "^C", " two", "stop"]), "a\n")
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert (ran.status, ran.out, ran.err) == (0, "One two\n", "")


def test_a_second_interrupt_does_not_wait_for_words(talk):
    engine = Scripted(["never", "stop"], ["Two", "stop"])
    stream = engine.stream

    def long_prompt(ids, params):
        engine.stream = stream
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        yield from stream(ids, params)

    engine.stream = long_prompt
    ran = talk(engine, "a\nb\n")
    assert (ran.status, ran.out) == (0, "never\n")  # the script's second answer goes unasked
    assert ran.err == "(stopped before the first word: the message was not kept)\n"


def test_failures_keep_the_conversation(talk, tiny):
    engine = Scripted(
        ["One", "stop"], [RuntimeError("the device\nis gone")], ["error"], ["Two", "stop"]
    )
    typed = "a\nb\nc\n" + "word " * 300 + "\n/save \n/nothing x\n/reset now\n"
    ran = talk(engine, typed.encode() + b"\xff\nd\n")
    assert (ran.status, ran.out) == (0, "One\nTwo\n")
    said = ran.err.splitlines()
    assert said[:2] == ["error: the device is gone", "error: the model gave non-finite logits"]
    assert said[2].startswith("error: the context holds 256 tokens, with this message the convers")
    assert said[3:6] == [
        "error: /save is no command: /help lists them",
        "error: /nothing x is no command: /help lists them",
        "error: /reset now is no command: /help lists them",
    ]
    assert said[6].startswith("error: the message is not valid text: character 0")
    asked = decoded(tiny, engine)[-1]
    assert "One<|end_of_turn|>\n[user]\nd<|end_of_turn|>" in asked


def test_a_full_context_is_told(talk, tiny):
    engine = Scripted(["One", *[""] * 300, "length"])
    ran = talk(engine, "a\n")
    line = "the context is full: /save FILE keeps the conversation, /reset starts over\n"
    assert ran.err == line


def test_what_cannot_be_talked_to_is_refused(monkeypatch, capfd, tmp_path):
    def no_engine(*args):
        raise AssertionError("weights were read")

    monkeypatch.setattr(common, "load_engine", no_engine)
    for args, message in (
        (["--json"], "generate takes messages"),
        (["--temperature=-1"], "from 0 to 100"),
        (["--system=\udcff"], "not valid text"),
        (["--max_new_tokens=0"], "at least 1"),
    ):
        ran = apps.call(chat, monkeypatch, capfd, f"--model={apps.TINY}", *args)
        assert message in ran.error and ran.status == 1
    for path in apps.TINY.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "tokenizer_config.json").unlink()
    ran = apps.call(chat, monkeypatch, capfd, f"--model={tmp_path}")
    assert "no chat template" in ran.error


# As a process.

# Slow steps: an answer outlasts whatever this machine does between its first word and the key.
_AT_A_TERMINAL = """
import fcntl, runpy, termios, time
from inference.engine import Engine

def slow_step(engine, step=Engine.step):
    time.sleep(0.1)
    return step(engine)

Engine.step = slow_step
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
runpy.run_module("scripts.chat", run_name="__main__")
"""


def test_through_a_pipe(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-m", "scripts.chat", *_SETTINGS, "--max_new_tokens=5", "--ignore_eos"],
        cwd=apps.ROOT, capture_output=True, text=True, timeout=240,
        env=compiling.environment(tmp_path),
        input="Hi\nAgain\n/stats",
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.endswith("\n") and "> " not in ran.stdout
    said = [line for line in ran.stderr.splitlines() if not line.startswith("compiling ")]
    assert said[1:3] == ["(cut off at --max_new_tokens=5)"] * 2
    assert said[3].startswith("4 messages, ") and "(predicted" in said[4]


@pytest.mark.timeout(900)
def test_ctrl_c_at_a_terminal(tmp_path):
    """In an answer it ends the answer, at the prompt the program."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", _AT_A_TERMINAL, *_SETTINGS, "--max_new_tokens=230", "--ignore_eos"],
        cwd=apps.ROOT, start_new_session=True, stdin=slave, stdout=slave, stderr=slave,
        env=compiling.environment(tmp_path, TERM="dumb"),
    )  # fmt: skip
    os.close(slave)
    screen = _Screen(master)
    try:
        screen.wait_for("> ")
        os.write(master, b"Hi\n")
        screen.wait_for("Hi\r\n")
        said = screen.text.index("Hi\r\n") + 4
        screen.wait_until(lambda: len(screen.text) > said)  # its first words
        os.write(master, b"\x03")
        screen.wait_for("(stopped: what was said stays)", said)
        screen.wait_for("\n> ", said)
        assert process.poll() is None
        prompted = len(screen.text)
        for _ in range(9):  # readline sleeps through a key that comes right behind its prompt
            os.write(master, b"\x03")
            if screen.shows("\n", prompted, seconds=20):
                break
        assert process.wait(timeout=120) == 0
        assert "Traceback" not in screen.text and "error" not in screen.text
    finally:
        process.kill()
        process.wait()
        os.close(master)


class _Screen:
    def __init__(self, master: int):
        self.text = ""
        self._master = master
        os.set_blocking(master, False)

    def wait_for(self, text: str, start: int = 0) -> None:
        self.wait_until(lambda: text in self.text[start:])

    def wait_until(self, holds) -> None:
        assert self._reads_until(holds, 120), self.text

    def shows(self, text: str, start: int, seconds: float) -> bool:
        return self._reads_until(lambda: text in self.text[start:], seconds)

    def _reads_until(self, holds, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline:
                return False
            try:
                self.text += os.read(self._master, 4096).decode(errors="replace")
            except BlockingIOError:
                time.sleep(0.002)
        return True
