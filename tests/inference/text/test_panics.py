"""Calls into Rust: what they leave of stderr."""

import contextlib
import os
import threading
from pathlib import Path

import pytest

from configs.errors import InputError
from inference.text import panics
from tests.inference.test_interrupts import Interrupts

pytestmark = pytest.mark.quick_code

DESCRIPTORS = Path("/proc/self/fd")


class PanicException(BaseException):
    """As pyo3 raises it where Rust panics."""


def write(text: str) -> None:
    os.write(2, text.encode())


def panic() -> None:
    write("a trace\n")
    raise PanicException("a panic")


def test_what_others_write_within_another_call_is_kept(capfd):
    def outer():
        with pytest.raises(InputError, match="^inner: a panic$"):
            panics.guard(panic, "inner")
        panics.guard(lambda: write("inner\n"), "inner")
        write("outer\n")
        assert capfd.readouterr().err == ""

    panics.guard(outer, "outer")
    assert capfd.readouterr().err == "inner\nouter\n"


@pytest.mark.parametrize("guarded", [lambda: write("meanwhile\n"), panic])
def test_an_interrupt_at_any_line_leaves_stderr_as_it_was(guarded, capfd):
    """And to other threads, without a descriptor more."""

    def call(interrupts):
        with contextlib.suppress(KeyboardInterrupt, InputError), interrupts.active():
            panics.guard(guarded, "a call")

    def in_a_thread(*numbers):
        thread = threading.Thread(target=call, args=[interrupts := Interrupts(*numbers)])
        thread.daemon = True
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        return interrupts.count

    def num_descriptors():
        return len(list(DESCRIPTORS.iterdir())) if DESCRIPTORS.exists() else 0

    num_lines, before = in_a_thread(), num_descriptors()
    assert num_lines > 20
    for number in range(1, num_lines + 1):
        in_a_thread(number)
        in_a_thread()
        capfd.readouterr()
        write("behind\n")
        assert capfd.readouterr().err == "behind\n", f"interrupted at line {number}"
        assert num_descriptors() == before
