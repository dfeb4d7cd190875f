"""Steps that only decode, summed up by a table, beside the cost model itself."""

import dataclasses

import numpy as np
import pytest

from configs import presets
from configs.engine import Config, EngineConfig
from configs.hardware import catalog
from configs.heads import Eagle, Medusa
from configs.model import ModelConfig
from inference.planner import cost, report, speculation
from inference.scheduling.step_schedule import StepRecord
from inference.scheduling.step_shapes import StepShape
from inference.server.engine_process.step_table import StepTable
from scripts.reports import decode_report
from tests import fakes

MACHINE = dataclasses.replace(
    catalog.get("h100"),
    overhead_s=1e-5,
    gamma=0.4,
    half_rows=3.0,
    attention_share=0.5,
    cache_share=0.4,
)


def exact(config, records):
    """Bytes and seconds, operation by operation."""
    num_bytes = seconds = 0.0
    for record in records:
        own = report.operations(config, record)
        more = speculation.drafting_operations(config, record)
        num_bytes += cost.total((*own, *more)).bytes
        seconds += report.seconds(config.model, own, MACHINE)
        seconds += decode_report.drafting_seconds(config, more, MACHINE)
    return num_bytes, seconds


def steps(config, width, generator, most=60):
    found = []
    last = config.max_context
    for _ in range(most):
        slots = int(generator.choice([1, 2, 8]))
        rows = []
        for _ in range(int(generator.integers(1, slots + 1))):
            queries = int(generator.integers(1, width + 1))
            rows.append((queries, int(generator.integers(queries, last + 1))))
        found.append(StepRecord(StepShape((slots, width), (0, 32)), tuple(rows), 0.1, 0.01))
    return found


MODELS = [
    fakes.llama(), fakes.deepseek(), fakes.deepseek_v32(), fakes.gemma(), fakes.gpt_oss(),
    fakes.delta(), fakes.jamba(), fakes.compressed(), fakes.hybrid(), fakes.quirks(),
    presets.get("smollm2-135m").config,
]  # fmt: skip


@pytest.mark.parametrize("linear", [None, "ffi_cpu"])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_sums_are_those_of_the_cost_model(model, linear):
    config = Config(model, EngineConfig.of(max_seqs=8, overcommit=True, linear=linear))
    records = steps(config, 1, np.random.default_rng(0))
    found = StepTable(config, MACHINE).needs(records)
    assert (found.bytes, found.seconds) == pytest.approx(exact(config, records), rel=1e-9)


OWN = {f.name: getattr(MODELS[0], f.name) for f in dataclasses.fields(ModelConfig)}
EAGLE = Eagle(**OWN | {"num_layers": 1, "pattern": MODELS[0].layers[:1]}, features=(1, 2))


@pytest.mark.parametrize("proposer, draft, settings", [
    ("ngram", None, {}), ("draft", MODELS[0], {}), ("eagle", EAGLE, {}),
    ("eagle", EAGLE, {"draft_tree": (0, 0, 1)}),
    ("medusa", Medusa(**OWN | {"num_layers": 0, "pattern": ()}), {}),
])  # fmt: skip
def test_what_drafts_is_in_the_sums(proposer, draft, settings):
    for linear in (None, "ffi_cpu"):
        engine = EngineConfig.of(
            max_seqs=8, proposer=proposer, num_drafts=3, linear=linear, **settings
        )
        config = Config(MODELS[0], engine, draft=draft)
        generator = np.random.default_rng(1)
        records = steps(config, 4, generator) + steps(config, 1, generator)
        found = StepTable(config, MACHINE).needs(records)
        assert (found.bytes, found.seconds) == pytest.approx(exact(config, records), rel=1e-9)


def test_a_table_asks_the_cost_model_once(monkeypatch):
    config = Config(MODELS[0], EngineConfig(max_seqs=8))
    table, records = StepTable(config, MACHINE), steps(config, 1, np.random.default_rng(2))
    table.prepare(tuple({record.shape for record in records}))
    monkeypatch.delattr(cost, "step_operations")
    assert table.needs(records).seconds > 0 and table.needs([]).bytes == 0
