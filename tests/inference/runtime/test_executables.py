"""What is compiled ahead: from shapes alone, once, and as if it were compiled when asked for."""

import contextlib
import itertools
import threading
import types

import pytest

from configs.engine import Config, EngineConfig
from inference.engine import Engine
from inference.runtime.executables import Executables
from inference.runtime.model_runner import for_this_device
from inference.scheduling import step_shapes
from layers.backends import backends
from tests import fakes
from tests.inference.test_interrupts import Interrupts

pytestmark = pytest.mark.quick_code


def test_steps_are_compiled_before_parameters_are_read(monkeypatch):
    """An executable refuses arrays of other shapes, types or leaves than it was compiled for."""
    model = fakes.llama()
    engine = for_this_device(Config(model, EngineConfig(max_seqs=2)))[0].engine
    expected, compiled = step_shapes.expected(engine, [9], 1), threading.Event()
    step = Executables.step

    def tell(executables, shape):
        found = step(executables, shape)
        if {*executables.shapes} == {*expected}:
            compiled.set()
        return found

    def read():
        assert compiled.wait(60)
        return fakes.real_params(model)

    monkeypatch.setattr(Executables, "step", tell)
    with fakes.no_draws():
        made = Engine(Config(model, engine), read, expected=expected)
        assert {*made.model_runner.executables.shapes} == {*expected}
        (answer,) = made.generate([list(range(3, 12))], fakes.greedy(4))
    assert {*made.model_runner.executables.shapes} == {*expected} and made.compile_s < 1
    assert len(answer.token_ids) == 4


def test_what_fails_ahead_fails_where_it_is_asked_for_and_is_tried_again(monkeypatch):
    def fail(executables, shape):
        raise RuntimeError("no memory")

    config = Config(fakes.llama(), EngineConfig(max_seqs=1))
    shape, *_ = step_shapes.expected(config.engine, [1], 1)
    executables = Executables(config, "reference", backends.XLA_CPU, {}, (), {})
    monkeypatch.setattr(Executables, "_lower_step", fail)
    executables.prepare([shape])
    with pytest.raises(RuntimeError, match="no memory"):
        executables.step(shape)
    lowered = types.SimpleNamespace(compile=lambda: "compiled")
    monkeypatch.setattr(Executables, "_lower_step", lambda *args: lowered)
    assert executables.step(shape) == "compiled" and executables.has(shape)


@pytest.fixture
def executables(monkeypatch):
    """Without a compiler."""
    lowered = types.SimpleNamespace(compile=lambda: "compiled")
    monkeypatch.setattr(Executables, "_lower_admit", lambda *args: lowered)
    config = Config(fakes.llama(), EngineConfig(max_seqs=1))
    return Executables(config, "reference", backends.XLA_CPU, {}, (), {})


def test_an_interrupt_before_a_compilation_lets_nobody_wait_for_it(executables, monkeypatch):
    class Interrupting(dict):
        def setdefault(self, key, value):
            super().setdefault(key, value)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(executables, "_compilations", interrupting := Interrupting())
        executables.admit()
    assert not interrupting and executables.admit() == "compiled"


def test_an_interrupt_while_one_is_looked_up_lets_nobody_wait_for_it(executables):
    """At any line, the end of a `with` among them, where it would stay entered."""
    executables.admit()
    for number in itertools.count(1):
        interrupts = Interrupts(number)
        with contextlib.suppress(KeyboardInterrupt), interrupts.active():
            executables.admit()
        thread = threading.Thread(target=executables.admit, daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        if interrupts.count < number:
            return
