"""`python -m scripts.kernelbench` where there is no accelerator: small shapes, every line of it."""

import copy
import dataclasses
import functools
import json

import jax
import pytest

from configs.hardware.spec import HardwareSpec
from configs.settings.kernels import ATTENTIONS
from inference.benchmark.kernels import products, timing
from inference.benchmark.kernels.attention_case import Case
from inference.planner.calibration import lookup
from layers.kernels.cpu import library
from layers.kernels.device import Device
from layers.linear import linear
from scripts import kernelbench
from scripts.reports import kernel_text
from tests.scripts import apps

pytestmark = pytest.mark.quick_code


@pytest.fixture
def run(monkeypatch, capfd):
    platforms = jax.config.jax_platforms
    yield lambda *args: apps.call(kernelbench, monkeypatch, capfd, *args)
    jax.config.update("jax_platforms", platforms)


def test_rows_and_table(run, monkeypatch):
    ran = run("--json", "--device=cpu")
    assert ran.status == 0, ran.err
    found = json.loads(ran.out)
    assert found["device"] == "cpu" and found["hardware"]["read_bandwidth"] > 0
    measured = copy.deepcopy(found["rows"])
    shuffled, in_order, prefill = found["rows"]
    assert shuffled["is_shuffled"] and not in_order["is_shuffled"] and prefill["queries"] == 128
    assert found["shuffled_over_in_order"]["reference"] > 0
    assert found["paged_over_contiguous"] == {}
    for row in found["rows"]:
        ours = row["results"].pop("reference"), row["results"].pop("ffi_cpu")
        for right in ours if library.is_loaded() else ours[:1]:
            assert right["status"] == "right" and right["seconds"] > 0
            assert right["error"] < 2.0**-6
        assert row["bytes"] > 0 and row["flops"] > 0 and row["predicted_s"] > 0
        assert {"pallas_gpu", "cudnn", "flash-attn3-jax"} <= set(row["results"])
        assert {result["status"] for result in row["results"].values()} == {"not run"}

    # Once is enough: what else is printed is of the same rows.
    monkeypatch.setattr(timing, "measure", lambda *_, **__: copy.deepcopy(measured))
    *earlier, last = map(json.loads, run("--json_lines").out.splitlines())
    assert [len(each["rows"]) for each in earlier] == [1, 2, 3] and len(last["rows"]) == 3
    assert "shuffled_over_in_order" in last

    lines = run().out.splitlines()
    assert lines[0].startswith("cpu, jax") and "GB/s" in lines[0]
    ours = [line for line in lines if line.startswith(("  reference", "  ffi_cpu")) and "%" in line]
    of_case = len(ours) // 3
    cases = [ours[at : at + of_case] for at in range(0, len(ours), of_case)]
    assert len(cases) == 3 and all(any("100%" in line for line in case) for case in cases)
    assert sum("not run: " in line for line in lines) >= 9


def test_products_are_right_before_they_are_timed(run, monkeypatch):
    machine = HardwareSpec("", 1e9, 1e9, {"bfloat16": 1e12})
    monkeypatch.setattr(lookup, "this_machine", lambda dtype: machine)
    ran = run("--products", "--json", "--device=cpu")
    assert ran.status == 0, ran.err
    result = json.loads(ran.out)
    assert [row["format"] for row in result["rows"]] == ["bfloat16", "int4"]
    for row in result["rows"]:
        assert row["bytes"] > 0 and set(row["results"]) == {"engine", "xla"}
        for product in row["results"].values():
            assert product["status"] == "right" and product["share"] > 0
    halves, fourths = (row["bytes"] for row in result["rows"])
    assert 0.25 < fourths / halves < 0.3

    case, *_ = products.cases("cpu")
    monkeypatch.setattr(products, "linear", lambda x_TD, w_FD: 1.01 * linear(x_TD, w_FD))
    monkeypatch.setattr(products, "cases", lambda platform: [case])
    lines = run("--products", "--only=xla").out.splitlines()
    assert len(lines) == 3 and " WRONG: error 1.0e-02" in lines[2]


def test_the_engines_products_are_those_of_its_programs():
    """By kernels, which read weights early, of matrices in the words that they read."""
    engine = products.implementations(Device("gpu", "NVIDIA H200", 132))["engine"]
    for case in products.cases("gpu"):
        w = jax.eval_shape(
            functools.partial(products.matrix, case, word=engine.word), jax.random.key(0)
        )
        kernel = engine.skinny_product(case.rows, w)
        assert kernel is not None and kernel.keywords == {"prefetch": True}, case.label


def test_what_is_wrong_is_told_without_a_time():
    results = {
        "one": {"status": "wrong", "error": 0.5, "is_repeatable": True},
        "two": {"status": "wrong", "error": None, "is_repeatable": False},
        "three": {"status": "right", "error": 1e-3, "is_repeatable": False, "seconds": 2e-3}
        | {"share": 0.5, "sizes": {"num_splits": 4}, "is_paged": True},
    }
    row = dataclasses.asdict(Case(8, 1, 64)) | {"case": "a case", "bytes": 1e6, "flops": 1e9}
    row |= {"bound": "memory", "predicted_s": 1e-3}
    hardware = {"read_bandwidth": 1e9, "rates": {"bfloat16": 1e12}}
    found = {"device": "chip", "jax": "0", "hardware": hardware, "tuning": {"attention": []}}
    faster = {"three": results["three"] | {"seconds": 1.6e-3}}
    found |= {"rows": [row | {"results": results}, row | {"results": faster, "is_shuffled": False}]}
    lines = kernel_text.table(found)
    assert lines[3:6] == [
        "a case: 1.0 MB, 1.00 GFLOP, memory: 1000.0 us",
        "  one             WRONG: error 5.0e-01",
        "  two             WRONG: not finite",
    ]
    three = ["three", "2000.0", "50%", "100%", "1.0e-03", "num_splits", "4,", "bits", "vary"]
    assert lines[6].split() == three
    assert lines[-4:] == [
        "pages in random order over pages in order, at most:",
        "  three                   1.25 x",
        "",
        "tuning.json: {'attention': []}",
    ]


def test_sizes_are_tuned_without_baselines(run, monkeypatch):
    chip, timed = Device("gpu", "a chip", 1), []

    def measure(cases, kernels, hardware, **more):
        timed.extend(kernel.name for kernel in kernels)
        yield dataclasses.asdict(Case(1, 1, 64)) | {"case": "a case", "results": {}}

    monkeypatch.setattr(kernelbench, "_device", lambda: chip)
    monkeypatch.setattr(timing, "measure", measure)
    monkeypatch.setattr(lookup, "this_machine", lambda dtype: HardwareSpec("", 1e9, 1e9, {}))
    ran = run("--tune", "--json_lines")
    assert ran.status == 0, ran.err
    assert timed == [*ATTENTIONS]
    assert json.loads(ran.out.splitlines()[-1])["tuning"].startswith("as it was: no time of the")


def test_what_pages_cost():
    def row(seconds, *sizes, is_shuffled=True, **peers):
        case = dataclasses.asdict(Case(*sizes, is_shuffled=is_shuffled))
        peers = {name: {"seconds": s, "is_paged": False} for name, s in peers.items()}
        own = {"one": {"seconds": seconds, "is_paged": True}, "two": {}}
        return case | {"results": own | peers}

    rows = [row(3.0, 8, 1, 64), row(2.0, 8, 1, 64, is_shuffled=False, cudnn=0.1)]
    rows += [row(9.0, 8, 1, 128, cudnn=9.0, flash=6.0), row(5.0, 4, 1, 64, cudnn=5.0)]
    rows += [row(5.0, 4, 1, 64, is_shuffled=False)]
    assert kernel_text.shuffled_over_in_order(rows) == {"one": 1.5}
    assert kernel_text.paged_over_contiguous(rows) == {"one": 1.5}


def test_a_device_that_is_not_there_is_one_line(tmp_path):
    """In a process in which JAX has not looked for one yet."""
    ran = apps.start("kernelbench", "--device=tpu", cache=tmp_path, JAX_PLATFORMS="")
    assert ran.error.startswith("error: --device=tpu: JAX ")


REFUSED = {
    "no such device": (["--device=gpu"], "--device=gpu: JAX computes on cpu here"),
    "no kind of device": (["--device=npu"], "should be one of <auto|cpu|gpu|tpu>"),
    "some are tuned": (
        ["--tune", "--only=reference"],
        "--tune compares all kernels of ours: leave",
    ),
    "products are tuned": (["--tune", "--products"], "--tune, --products and --ceilings are three"),
    "a model": (["--model=llama3-8b"], "kernelbench does not read --model\n"),
    "a rate": (["--rate=3"], "kernelbench does not read --rate\n"),
    "nothing to tune": (["--tune"], "--tune needs an accelerator"),
    "too few": (["--repeats=2"], "--repeats is at least 3, not 2"),
    "nobody": (["--only=reference,cublas"], "--only lists some of reference, pallas_gpu, "),
    "no time": (["--seconds=0"], "--seconds is above 0, not 0.0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(run, case):
    args, message = REFUSED[case]
    assert message in run(*args).error
