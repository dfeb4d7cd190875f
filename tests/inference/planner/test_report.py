"""Shares of a device's rates, by hand."""

import dataclasses

import pytest

from configs import presets
from configs.engine import Config
from configs.kinds import params
from inference.planner import cost, report
from inference.planner.calibration import lookup, measure
from inference.planner.cost import Work
from inference.scheduling.step_schedule import StepRecord
from inference.scheduling.step_shapes import StepShape
from layers.kernels.cpu import library
from tests import fakes

CONFIG = Config(fakes.llama())
DECODE, PREFILL = StepShape((2, 1), (0, 32)), StepShape((0, 1), (1, 32))


def test_shares_of_measured_rates():
    records = [StepRecord(DECODE, ((1, 50),), seconds, 0.0) for seconds in (0.5, 0.25, 0.125)]
    prompt = StepRecord(PREFILL, ((32, 32),), 9.0, 0.0)
    num_bytes = cost.total(report.operations(CONFIG.model, records[0])).bytes
    flops = cost.total(cost.step_operations(CONFIG.model, Work.prefill(1, 30))).flops
    found = report.shares(CONFIG, [*records, prompt], 30, 300.0, (8 * num_bytes, 20 * flops))
    assert found.decode_bandwidth_share == pytest.approx(0.5)
    assert found.prefill_rate_share == pytest.approx(0.5)  # ten prompts a second
    assert (found.read_bandwidth, found.best_product_rate) == (8 * num_bytes, 20 * flops)
    assert report.shares(CONFIG, [prompt], 30, 300.0, (1.0, 1.0)).decode_bandwidth_share is None


def test_formats_of_products():
    model = presets.get("smollm2-135m").config  # whose rows are whole blocks
    assert report.product_formats(model) == (model.dtype,)
    paths = ["/".join(path) for path, info in params.leaves(model.parameters()) if info.is_matrix]
    mixed = dataclasses.replace(model, formats=tuple((path, ("q8_0",)) for path in paths[:-1]))
    assert {*report.product_formats(mixed)} == {"q8_0", model.dtype}


def test_the_best_product_is_the_fastest_of_all(monkeypatch):
    rates = {("bfloat16", False): 3.0, ("bfloat16", True): 5.0, ("q4_0", True): 4.0}
    monkeypatch.setattr(measure, "_matrix", lambda format, packs: (format, packs))
    monkeypatch.setattr(measure, "_product_rate", lambda w, repeats: rates[w])
    monkeypatch.setattr(measure, "read_bandwidth", lambda: 7.0)
    monkeypatch.setattr(library, "is_loaded", lambda: True)
    assert lookup.rates_now(["q4_0", "bfloat16"]) == (7.0, 5.0)
    assert measure.best_matmul_rate(["q4_0"]) == 4.0
    assert measure.matmul_rate("bfloat16") == 5.0
    monkeypatch.setattr(library, "is_loaded", lambda: False)
    assert measure.best_matmul_rate(["bfloat16"]) == measure.matmul_rate("bfloat16") == 3.0
