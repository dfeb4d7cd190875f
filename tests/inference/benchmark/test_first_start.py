"""The first start of a model calibrates what predicts it: real steps of a tiny model."""

import dataclasses
import types

import pytest

from configs.hardware.spec import HardwareSpec
from inference.benchmark import first_start
from inference.planner.calibration import lookup, measure, quick, store
from inference.scheduling import step_shapes
from tests import fakes

pytestmark = pytest.mark.quick_code

MODEL = fakes.llama()
FOUND = HardwareSpec("cpu", 16e9, 20e9, {"float32": 1e11}, gamma=0.5)
_PROMPTS, _PARAMS = fakes.prompts([70, 3]), fakes.greedy(4)


@pytest.fixture
def said(monkeypatch, tmp_path):
    """What was said; rates and bandwidth cost nothing to measure."""
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    monkeypatch.setattr(first_start, "_LEAST_BYTES", 1)
    monkeypatch.setattr(measure, "matmul_rate", lambda dtype: 1e11)
    monkeypatch.setattr(measure.Probe, "__init__", lambda self: None)
    monkeypatch.setattr(measure.Probe, "read", lambda self: 20e9)
    monkeypatch.setattr(measure.Probe, "close", lambda self: None)
    return []


@pytest.fixture(scope="module")
def engine():
    engine = fakes.engine(
        MODEL, draws=False, max_seqs=2, prefill_chunks=(2,), chunked_prefill=False
    )
    engine.generate(_PROMPTS, _PARAMS)
    return engine


def test_the_first_answer_calibrates_and_later_ones_find_that(engine, said, monkeypatch):
    tokens = [answer.token_ids for answer in engine.generate(_PROMPTS, _PARAMS)]
    points = []
    calibrated = quick.calibrated

    def spy(hardware, chosen, *more):
        points.extend(chosen)
        return calibrated(hardware, chosen, *more)

    monkeypatch.setattr(quick, "calibrated", spy)
    found = first_start.calibration(engine, say=said.append)
    assert found is not None and found.is_calibrated and found.rates == {"float32": 1e11}
    assert len(said) == 1 and "timing steps" in said[0]
    assert {bool(point.rows) for point in points} == {True, False}
    assert {point.shape for point in points} <= {*engine.model_runner.executables.shapes}
    assert len({point.context for point in points}) > 1
    assert first_start.calibration(engine, say=said.append) == found == store.calibration(MODEL)
    assert len(said) == 1
    assert store.calibration(dataclasses.replace(MODEL, dtype="bfloat16")) is None
    # The steps wrote to pages that may have been cached.
    assert [answer.token_ids for answer in engine.generate(_PROMPTS, _PARAMS)] == tokens


def test_a_machine_that_was_busy_is_calibrated_again(engine, said, monkeypatch):
    store.write(dataclasses.replace(FOUND, read_bandwidth=10e9), MODEL)
    found = first_start.calibration(engine, say=said.append)
    assert len(said) == 1 and found.read_bandwidth == 20e9
    monkeypatch.setattr(measure.Probe, "read", lambda self: 10e9)
    slow = first_start.calibration(engine, say=said.append)
    assert len(said) == 1 and slow.read_bandwidth == lookup.SCATTER * 10e9  # as slow as it reads
    first_start.calibration(engine, anew=True, say=said.append)
    assert len(said) == 2


def test_other_products_are_calibrated_anew(engine, said):
    """What steps with XLA's products showed predicts none with packed weights."""
    store.write(dataclasses.replace(FOUND, implementations="others"), MODEL)
    found = first_start.calibration(engine, say=said.append)
    assert (
        said
        and found == store.read(MODEL)
        and found.implementations == engine.model_runner.implementations
    )
    assert store.calibration(MODEL, found.implementations) == found
    assert store.calibration(MODEL, "others") is None


@pytest.mark.parametrize("damage", ["", "{}", "[1]", '{"gamma": 1}'])
def test_a_damaged_file_counts_as_none(engine, said, damage):
    store.write(FOUND, MODEL)
    store.path(MODEL).write_text(damage)
    found = first_start.calibration(engine, say=said.append)
    assert said and store.read(MODEL) == found


def test_nothing_is_timed_where_that_tells_nothing(engine, said, monkeypatch):
    monkeypatch.setattr(quick, "SECONDS", 0.0)  # no step is that fast
    assert first_start.calibration(engine, say=said.append) is None and said
    assert not store.path(MODEL).exists()
    monkeypatch.setattr(first_start, "_LEAST_BYTES", 1 << 40)
    assert first_start.calibration(engine, say=said.append) is None and len(said) == 1
    monkeypatch.setattr(first_start.jax, "default_backend", lambda: "gpu")
    assert first_start.calibration(engine, say=said.append) is None and len(said) == 1


def test_the_points_tell_rows_contexts_and_prompts_apart():
    """What a long context adds is not seen at short ones, nor many rows at few."""
    engine = fakes.engine(
        dataclasses.replace(MODEL, max_context=4096), max_context=4096, cache_bytes=64 << 20,
        max_seqs=16, decode_rows=(2, 8, 16), prefill_chunks=(1, 2), draws=False,
    )  # fmt: skip
    runner = engine.model_runner
    shapes = [shape for shape in step_shapes.enumerate_shapes(runner.config.engine)]
    executables = types.SimpleNamespace(shapes=shapes)
    fake = types.SimpleNamespace(config=runner.config, executables=executables)
    found = [(point.rows, point.chunks, point.context) for point in first_start.prepared(fake)]
    chunk = runner.config.engine.shapes.chunk_tokens
    assert found == [
        (2, 0, chunk), (0, 1, chunk), (16, 0, chunk), (0, 1, 3072), (8, 0, 3072), (8, 0, chunk),
        (2, 0, 3072), (16, 0, 1536), (0, 2, 2 * chunk),
    ]  # fmt: skip
