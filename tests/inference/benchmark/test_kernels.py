"""The benchmark of kernels: who is wrong has no time, and what is written down was right and
faster.
"""

import datetime
import functools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
from jax.experimental.pallas import tpu as pltpu

from configs.hardware.spec import HardwareSpec
from inference.benchmark.kernels import attention_case, baselines, timing, tune
from inference.benchmark.kernels.attention_case import Case
from inference.benchmark.kernels.baselines import Kernel
from inference.planner.calibration import lookup, on_device
from layers import page_rows
from layers.kernels import tuning
from layers.kernels.attention import api, gpu, tpu
from layers.kernels.device import Device
from tests import compiling
from tests.interpreted import threads_are_compiled_once  # noqa: F401

pytestmark = pytest.mark.quick_code

CHIP = HardwareSpec("chip", 1e9, 1e9, {"bfloat16": 1e12})
CASE = Case(3, 1, 200, 4, 2, 64)
REFERENCE, PALLAS, *FOR_TPUS = baselines.kernels()[:4]


def bench(*chosen, case=CASE, **options):
    options = {"repeats": 3, "budget_s": 60.0, "seed": 1} | options
    (row,) = timing.measure([case], chosen, CHIP, **options)
    return row


def changed(change, **fields) -> Kernel:
    """The reference with another output."""

    def attend(*args, **sizes):
        out_YWNH, stored = REFERENCE.attend(*args)
        return change(out_YWNH, **sizes), stored

    return REFERENCE._replace(attend=attend, **fields)


@pytest.mark.parametrize(
    "case", [CASE, Case(2, 128, 128, 4, 2, 64, is_shuffled=False), Case(2, 7, 150, 9, 3, 10, 16)]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_float64_agrees_with_the_reference_and_with_nothing_else(case, dtype):
    case = Case(**{**case.__dict__, "dtype": dtype})
    arrays = attention_case.ragged(case, compiling.call(attention_case.draw, case=case, seed=0), 0)
    sample = attention_case.sample(case, arrays)
    assert len({*np.asarray(arrays.length_Y)}) > 1 or case.queries == case.context

    def attend(arrays):
        return REFERENCE.attend(arrays.q_YWNH, arrays, REFERENCE.store(case, arrays))

    out, _ = compiling.call(attend, arrays)
    assert attention_case.is_right(case, attention_case.error(sample, out))
    swapped = out[:, :, ::-1]  # each head is somebody else's
    assert attention_case.error(sample, swapped) > 0.5
    late = arrays._replace(length_Y=jnp.maximum(arrays.length_Y - 1, case.queries))
    if case.queries < case.context:
        off = attention_case.error(attention_case.sample(case, late), out)
        assert not attention_case.is_right(case, off)
    assert attention_case.error(sample, out.at[-1, -1, -1, -1].set(jnp.nan)) is None


def test_bytes_and_flops_are_the_planners():
    """But for the new tokens, which are in the cache before."""
    operation = CASE.operation
    queries_and_output = 2 * 3 * 4 * 64 * 2
    assert operation.bytes == CASE.cache_bytes + queries_and_output
    assert operation.flops == 3 * 4 * 200 * 4 * 64
    assert Case(1, 128, 128).operation.flops == 4 * 32 * 128 * 128 * 129 / 2


def test_who_is_right_has_a_time():
    row = bench(REFERENCE, PALLAS)
    found = row["results"]["reference"]
    assert found["status"] == "right" and found["is_repeatable"] and found["sizes"] == {}
    assert found["share"] == row["predicted_s"] / found["seconds"] > 0
    assert row["bound"] == "memory" and row["predicted_s"] == row["bytes"] / 1e9
    assert row["results"]["pallas_gpu"]["reason"].endswith("not on cpu")
    assert "seconds" not in row["results"]["pallas_gpu"]


WRONG = {
    "a little": lambda out: out * 1.01,
    "one head": lambda out: out.at[:, :, 1].set(out[:, :, 0]),
    "unwritten": lambda out: out.at[-1, 0, 0, 0].set(jnp.nan),
}


@pytest.mark.parametrize("kind", WRONG)
def test_who_is_wrong_has_none(kind):
    found = bench(changed(WRONG[kind]))["results"]["reference"]
    assert found["status"] == "wrong" and "seconds" not in found and "share" not in found
    assert (found["error"] is None) == (kind == "unwritten")


def test_rows_of_any_length_are_asked_for():
    """One that takes every row for a full one is right on full rows alone."""

    def attend(q_YWNH, arrays, stored):
        full = arrays._replace(length_Y=jnp.full_like(arrays.length_Y, 200))
        return REFERENCE.attend(q_YWNH, full, stored)

    assert bench(REFERENCE._replace(attend=attend))["results"]["reference"]["status"] == "wrong"
    forgiving = REFERENCE._replace(attend=attend, has_lengths=False)
    assert bench(forgiving)["results"]["reference"]["status"] == "right"


def test_a_failure_is_one_line_and_the_others_go_on():
    def fail(out):
        raise NotImplementedError("no such\nmask")

    row = bench(changed(fail, name="other"), REFERENCE)
    assert row["results"]["other"] == {
        "status": "failed",
        "reason": "NotImplementedError: no such mask",
    }
    assert row["results"]["reference"]["status"] == "right"
    late = bench(REFERENCE, budget_s=-1.0)["results"]["reference"]
    assert late == {"status": "out of time", "reason": "was not begun"}


def test_the_fastest_sizes_count(monkeypatch):
    times = iter([3e-3, 1e-3, 2e-3])
    monkeypatch.setattr(on_device, "seconds", lambda *args, **options: next(times))
    sizes = tuple({"n": n} for n in (1, 2, 3))
    peer = changed(lambda out, n: out, candidates=lambda case, device, tunes: sizes)
    found = bench(peer)["results"]["reference"]
    assert found["sizes"] == {"n": 2} and found["seconds"] == 1e-3
    assert [each["seconds"] for each in found["candidates"]] == [3e-3, 1e-3, 2e-3]


def test_one_whose_bits_vary_is_told(monkeypatch):
    """Whatever the size that is the fastest."""
    times, runs = iter([1e-3, 2e-3]), iter(range(100))
    monkeypatch.setattr(on_device, "seconds", lambda *args, **options: next(times))

    def drift(out, n):
        late = jax.pure_callback(lambda: np.float32(next(runs)), jnp.zeros(()))
        return out * (1 + (n - 1) * 1e-5 * late)

    sizes = tuple({"n": n} for n in (1, 2))
    found = bench(changed(drift, candidates=lambda case, device, tunes: sizes))["results"]
    assert found["reference"]["sizes"] == {"n": 1} and not found["reference"]["is_repeatable"]


@pytest.fixture
def tuned(monkeypatch, tmp_path):
    """Writes `tuning.json`; what it says counts within the test."""
    path = tmp_path / "tuning.json"
    monkeypatch.setattr(tuning, "PATH", path)

    def write(found):
        path.write_text(json.dumps(found))
        tuning.results.cache_clear()
        return path

    yield write
    tuning.results.cache_clear()


@pytest.mark.long
def test_a_kernel_is_tuned_from_check_to_file(monkeypatch, tuned):
    """The Hopper kernel in its interpreter, which says nothing of its time; what an earlier run
    wrote does not matter.
    """
    kind = jax.devices()[0].device_kind
    tuned({kind: {"sizes": {"pallas_gpu": {"H64 page64 blocks4": {"num_splits": 4}}}}})
    asked, split = [], gpu._split_pages
    monkeypatch.setattr(gpu, "_split_pages", lambda *args: asked.append(args[-1]) or split(*args))
    attend = functools.partial(gpu.attend_pages, interpret=InterpretGPUParams())
    limit = lambda demand, device: None  # noqa: E731
    kernel = api.implementation("pallas_gpu")._replace(limit=limit, attend_pages=attend)
    own = api.implementation
    monkeypatch.setattr(
        api, "implementation", lambda name: kernel if name == "pallas_gpu" else own(name)
    )
    times = iter([9.0, 5.0, 3.0, 4.0])  # the reference; two splits by itself, one, four
    monkeypatch.setattr(on_device, "seconds", lambda *args, **options: next(times))
    engine_kernel = baselines._engine_kernel("pallas_gpu")
    candidates = engine_kernel.candidates
    engine_kernel = engine_kernel._replace(
        candidates=lambda case, device, tunes: candidates(
            case, device._replace(num_cores=8), tunes
        )[:3]
    )
    row = bench(REFERENCE, engine_kernel, *FOR_TPUS, case=Case(2, 1, 130, 4, 2, 64), tunes=True)
    found = row["results"]["pallas_gpu"]
    best = {"num_splits": 1, "num_stages": 4}
    assert found["status"] == "right" and found["sizes"] == best
    assert {*asked} == {2, 1, 4}
    entry = tune.entry([row])
    assert entry["attention"] == ["pallas_gpu"]
    assert entry["sizes"] == {"pallas_gpu": {"H64 page64 blocks4": best}}


def test_cases_fit_the_device():
    full = timing.cases("gpu", 141e9)
    assert max(case.cache_bytes for case in full if case.is_decode) > 1e9
    assert sum(case.cache_bytes >= 256e6 for case in full) >= 4
    small = timing.cases("gpu", 2e9)
    assert small and all(4 * case.cache_bytes <= 2e9 for case in small)
    assert len(small) == len(set(small))
    assert {case.page_tokens for case in timing.cases("tpu", 32e9)} == {128}
    assert all(case.cache_bytes < 1e6 for case in timing.cases("cpu", 141e9))


def test_sizes_are_tried_around_what_fills_the_device():
    device = Device("gpu", "NVIDIA H200", 132)
    assert PALLAS.limit(Case(32, 1, 4096), device) is None

    def tried(case):
        candidates = PALLAS.candidates(case, device, True)
        return [(sizes["num_splits"], sizes["num_stages"]) for sizes in candidates]

    assert tried(Case(1, 1, 8192)) == [
        (16, 4), (1, 4), (8, 4), (32, 4), (64, 4), (16, 2), (32, 2),
    ]  # fmt: skip
    assert tried(Case(256, 1, 128)) == [(1, 4), (2, 4), (1, 2), (2, 2)]  # two pages: no more splits
    assert tried(Case(1, 1, 8192, 8, 4, 256)) == [(33, 2), (1, 2), (16, 2), (66, 2)]  # no room
    assert PALLAS.candidates(Case(1, 1, 8192), device, False) == ({},)
    assert PALLAS.candidates(Case(1, 64, 64), device, True) == ({},)


@pytest.mark.parametrize("case", [Case(1, 1, 8192), Case(256, 1, 128), Case(32, 1, 4096)])
def test_the_first_candidate_is_the_kernels_own_rule(monkeypatch, case):
    device = Device("gpu", "a new one", 132)
    monkeypatch.setattr(gpu, "target_device", lambda: device)

    class Asked(Exception):
        pass

    def stop(*args, num_stages, **options):
        raise Asked({"num_splits": args[2].start_ZX.shape[1], "num_stages": num_stages})

    monkeypatch.setattr(gpu, "_attend_splits", stop)
    arrays = jax.eval_shape(lambda: attention_case.draw(case, 0))
    with pytest.raises(Asked) as asked:
        jax.eval_shape(PALLAS.attend, arrays.q_YWNH, arrays, _pages(case))
    assert PALLAS.candidates(case, device, True)[0] == asked.value.args[0]


def _pages(case):
    return api.implementation("pallas_gpu").layout(
        1 + case.rows * case.columns, case.page_tokens, case.page_format
    )


def test_one_that_appends_does_so_in_every_run(monkeypatch):
    """The TPU kernel in its interpreter: the newest tokens are not in its pages before."""
    interpret = pltpu.InterpretParams()
    append = functools.partial(tpu.append_and_attend, interpret=interpret)
    kernel = api.implementation("pallas_tpu")._replace(
        limit=lambda demand, device: None, append_and_attend=append
    )
    own = api.implementation
    monkeypatch.setattr(
        api, "implementation", lambda name: kernel if name == "pallas_tpu" else own(name)
    )
    monkeypatch.setattr(on_device, "seconds", lambda *args, **options: 1.0)
    case, engine_kernel = Case(2, 1, 130, 4, 2, 64), baselines._engine_kernel("pallas_tpu")
    arrays = attention_case.draw(case, 0)
    pages = engine_kernel.store(case, arrays)
    complete = REFERENCE.store(case, arrays)
    assert np.isnan(page_rows.decode(pages)).any()
    _, left = compiling.call(engine_kernel.attend, arrays.q_YWNH, arrays, pages)
    np.testing.assert_array_equal(left[1:], complete[1:])
    found = bench(engine_kernel, case=case)["results"]["pallas_tpu"]
    assert found["status"] == "right" and found["is_repeatable"]

    def forgets(q_YWNH, row_YWX, pages, *told):
        return own("reference").attend_pages(q_YWNH, pages, *told), pages

    kernel = kernel._replace(append_and_attend=forgets)
    assert bench(engine_kernel, case=case)["results"]["pallas_tpu"]["status"] == "wrong"


def test_tpu_inference_appends_and_gets_its_own_pages(monkeypatch):
    """A stand-in with the library's arguments reads the pages that were written for it."""

    def attention(q_TNH, k_TKH, v_TKH, pages, lengths, table, starts, distribution):
        Y, (_, page_tokens, K, _, H) = lengths.shape[0], pages.shape
        assert distribution.tolist() == [0, 0, Y] and pages.shape[3] == 2
        is_new = np.arange(starts[1]) + (lengths - starts[1])[:, None]
        slot = table.reshape(Y, -1)[np.arange(Y)[:, None], is_new // page_tokens]
        row_TKXH = jnp.stack([k_TKH, v_TKH], axis=2).reshape(*is_new.shape, K, 2, H)
        pages = pages.at[slot, is_new % page_tokens].set(row_TKXH)
        rows = pages[table.reshape(Y, -1)].reshape(Y, -1, K, 2, H)
        k_YSKH, v_YSKH = (rows[:, : case.context, :, part] for part in (0, 1))
        seen = arrays._replace(k_YSKH=k_YSKH, v_YSKH=v_YSKH)
        out_YWNH, _ = REFERENCE.attend(arrays.q_YWNH, seen, REFERENCE.store(case, seen))
        return out_YWNH.reshape(q_TNH.shape), pages

    library = types.SimpleNamespace(ragged_paged_attention=attention)
    monkeypatch.setattr(baselines, "ragged_library", lambda: library)
    kernel, case = baselines._RAGGED_PAGED, Case(2, 3, 130, 4, 2, 128)
    arrays = attention_case.draw(case, 0)
    pages = kernel.store(case, arrays)
    out_YWNH, written = kernel.attend(arrays.q_YWNH, arrays, pages)
    expected, _ = REFERENCE.attend(arrays.q_YWNH, arrays, REFERENCE.store(case, arrays))
    np.testing.assert_array_equal(out_YWNH, expected)
    np.testing.assert_array_equal(written, pages)  # they had the newest tokens
    assert "is not installed" in kernel.limit(case, Device("tpu", "TPU v6e", 1))
    assert "for TPUs" in kernel.limit(case, Device("gpu", "NVIDIA H200", 132))
    monkeypatch.setattr(baselines, "_TPU_INFERENCE", "numpy")
    assert "multiple of 128" in kernel.limit(CASE, Device("tpu", "TPU v6e", 1))


# --- what is written down -------------------------------------------------------------------------


def row(own, reference, case=CASE, candidates=None):
    right = {"status": "right", "sizes": {}, "is_repeatable": True}
    found = {"pallas_gpu": right | {"seconds": own}, "reference": right | {"seconds": reference}}
    if candidates:
        tried = [{"sizes": dict(sizes), "seconds": s} for sizes, s in candidates.items()]
        found["pallas_gpu"] |= {"candidates": tried}
    found |= {name: {"status": "not run"} for name in ("pallas_tpu", "jax_tpu")}
    return {**case.__dict__, "case": case.label, "results": found}


def test_winners_are_right_and_faster_in_every_case():
    assert tune.entry([row(1.0, 3.0), row(1.0, 1.5)])["attention"] == ["pallas_gpu"]
    assert tune.entry([row(1.0, 3.0), row(1.0, 0.9)])["attention"] == []
    assert tune.entry([row(1.0, 1.001)])["attention"] == []
    for status in ("wrong", "failed"):
        bad = row(1.0, 3.0)
        bad["results"]["pallas_gpu"] = {"status": status}
        assert tune.entry([row(1.0, 3.0), bad])["attention"] == []
    absent = row(1.0, 3.0)
    absent["results"]["pallas_gpu"] = {"status": "not run"}
    assert tune.entry([absent])["attention"] == []
    assert tune.entry([row(1.0, 3.0), absent])["attention"] == ["pallas_gpu"]
    varying = row(1.0, 3.0)
    varying["results"]["pallas_gpu"]["is_repeatable"] = False
    assert tune.entry([row(1.0, 3.0), varying])["attention"] == []


def test_too_few_measurements_decide_nothing():
    whole = row(1.0, 3.0)
    assert tune.missing([whole, whole]) is None
    late = row(1.0, 3.0, Case(4, 1, 900, 4, 2, 64))
    late["results"]["pallas_gpu"] = {"status": "out of time"}
    assert tune.missing([whole, late]) == f"pallas_gpu was not begun: {late['case']}"
    for status in ("out of time", "failed", "wrong"):
        alone = row(1.0, 3.0)
        alone["results"]["reference"] = {"status": status}
        assert tune.missing([whole, alone]).startswith(f"no time of the reference ({status}): ")
    del alone["results"]["reference"]
    assert "no time of the reference (None)" in tune.missing([alone])


def test_sizes_are_written_where_they_beat_the_kernels_own():
    one, two, four = ((("num_splits", n),) for n in (1, 2, 4))
    short = row(1.0, 3.0, candidates={one: 10e-6, two: 5e-6, four: 6e-6})
    long = row(1.0, 3.0, Case(4, 1, 900, 4, 2, 64), {one: 900e-6, two: 1000e-6, four: 450e-6})
    found = tune.entry([short, long], datetime.date(2026, 1, 2))
    assert found == {
        "attention": ["pallas_gpu"],
        "cases": [short["case"], long["case"]],
        "date": "2026-01-02",
        "jax": jax.__version__,
        "sizes": {"pallas_gpu": {"H64 page64 blocks8": {"num_splits": 4}}},
    }
    slower = row(1.0, 3.0, candidates={one: 10e-6, two: 9.95e-6})
    assert tune.entry([slower])["sizes"] == {}


def test_the_file_keeps_other_devices(tuned):
    path = tuned({"other": {"attention": ["pallas_gpu"]}})
    shape_class = tuning.attention_class(3, 2, 64, 64)
    sizes = {"pallas_gpu": {shape_class: {"num_splits": 2}}}
    chip, other, unknown = (Device("gpu", kind, 4) for kind in ("chip", "other", "unknown"))
    tune.write(chip, {"attention": ["pallas_gpu"], "sizes": sizes})
    assert tuning.winners("attention", other) == ("pallas_gpu",)
    assert tuning.winners("attention", chip) == ("pallas_gpu",)
    assert tuning.sizes("pallas_gpu", chip, shape_class) == {"num_splits": 2}
    assert tuning.sizes("pallas_gpu", chip, "H1 page64 blocks1") == {}
    assert tuning.sizes("pallas_gpu", unknown, shape_class) == {}
    tune.write(chip, {"attention": []})
    assert tuning.winners("attention", chip) == () and tuning.winners("attention", unknown) is None
    assert json.loads(path.read_text())["chip"] == {"attention": [], "cores": 4}
    assert list(json.loads(path.read_text())) == ["chip", "other"]


# --- the clock ------------------------------------------------------------------------------------


def test_a_run_is_timed_as_often_as_it_takes(monkeypatch):
    """Calls that hold several runs, and a data dependence from each to the next."""
    ticks = iter([0.0, 6.0, 10.0, 19.0, 20.0, 26.0])
    clock = types.SimpleNamespace(perf_counter=lambda: next(ticks))
    monkeypatch.setattr(on_device, "time", clock)
    seen = []

    def step(x, y):
        jax.debug.callback(lambda value: seen.append(int(value)), x)
        return x + y

    found = on_device.seconds(step, jnp.int32(0), jnp.int32(1), expected_s=0.5, call_s=1.0)
    jax.effects_barrier()
    assert sorted(seen) == list(range(2 * (1 + 3 * 3)))  # a warm-up, three times three calls
    assert found == 1.0  # the median of 6, 9 and 6 seconds for 6 runs


def test_rates_of_the_device():
    assert on_device.copy_bandwidth(1 << 16) > 0
    assert on_device.matmul_rate("float32", 64) > 0
    assert on_device.memory_bytes() > 0


def test_an_accelerator_is_measured_where_there_is_one(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(on_device, "copy_bandwidth", lambda: 5.0)
    monkeypatch.setattr(on_device, "matmul_rate", lambda dtype: 7.0)
    found = lookup.this_machine("bfloat16")
    assert found.read_bandwidth == 5.0 and found.rates == {"bfloat16": 7.0}
    assert found.name == jax.devices()[0].device_kind
