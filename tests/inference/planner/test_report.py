"""Shares of a device's rates, by hand."""

import dataclasses

import jax
import pytest

from configs import presets
from configs.engine import Config, EngineConfig
from configs.hardware import catalog
from configs.heads import DFlash, Eagle, Medusa
from configs.kinds import params
from configs.model import ModelConfig
from inference.planner import cost, report, speculation, weights
from inference.planner.calibration import lookup, measure
from inference.planner.cost import Work
from inference.runtime.model_runner import cache_arguments
from inference.scheduling.step_schedule import StepRecord
from inference.scheduling.step_shapes import StepShape
from layers import kv_cache
from layers.kernels.cpu import library
from scripts.reports import decode_report, rate_shares
from tests import fakes

CONFIG = Config(fakes.llama())
DECODE, PREFILL = StepShape((2, 1), (0, 32)), StepShape((0, 1), (1, 32))


def test_shares_of_measured_rates():
    records = [StepRecord(DECODE, ((1, 50),), seconds, 0.0) for seconds in (0.5, 0.25, 0.125)]
    prompt = StepRecord(PREFILL, ((32, 32),), 9.0, 0.0)
    num_bytes = cost.total(report.operations(CONFIG, records[0])).bytes
    flops = cost.total(cost.step_operations(CONFIG.model, Work.prefill(1, 30))).flops
    rates = 8 * num_bytes, 20 * flops
    batch = StepRecord(DECODE, ((1, 50),) * 2, 0.5, 0.0)
    shares = rate_shares.shares(CONFIG, [*records, prompt], [*records, batch], 30, 300.0, rates)
    done = cost.total(report.operations(CONFIG, batch)).flops
    assert shares.batch_rate_share == pytest.approx(done / 0.5 / rates[1])
    assert shares.decode_bandwidth_share == pytest.approx(0.5)
    assert shares.prefill_rate_share == pytest.approx(0.5)  # ten prompts a second
    assert (shares.read_bandwidth, shares.best_product_rate) == rates
    none = rate_shares.shares(CONFIG, [prompt], [prompt], 30, 300.0, (1.0, 1.0))
    assert none.decode_bandwidth_share is none.batch_rate_share is None


@pytest.mark.parametrize("linear", ["reference", "ffi_cpu"])
def test_the_cpus_own_products_leave_padding_out(linear):
    config = dataclasses.replace(CONFIG, engine=EngineConfig.of(linear=linear))
    shape = StepShape((8, 2), (4, 32))
    rows = ((2, 50), (1, 40), (32, 32), (7, 90))
    record = StepRecord(shape, rows, 0.0, 0.0)
    found = report.operations(config, record)
    counts = (42, 5) if linear == "ffi_cpu" else (144, 20)  # tokens and rows of logits
    each = tuple(cost.Rows(1, *row) for row in rows)
    assert found == cost.step_operations(config.model, Work(counts[0], each, counts[1]))
    for model in (fakes.quirks(), fakes.deepseek(), fakes.delta()):  # biases, experts, states
        whole = cost.step_operations(model, Work(144, each, 20))
        assert report.operations(dataclasses.replace(config, model=model), record) == whole


def test_formats_of_products():
    model = presets.get("smollm2-135m").config  # whose rows are whole blocks
    assert rate_shares.product_formats(model) == (model.dtype,)
    paths = ["/".join(path) for path, info in params.leaves(model.parameters()) if info.is_matrix]
    mixed = dataclasses.replace(model, formats=tuple((path, ("q8_0",)) for path in paths[:-1]))
    assert {*rate_shares.product_formats(mixed)} == {"q8_0", model.dtype}


def test_the_best_product_is_the_fastest_of_all(monkeypatch):
    rates = {("bfloat16", False): 3.0, ("bfloat16", True): 5.0, ("q4_0", True): 4.0}
    monkeypatch.setattr(measure, "_matrix", lambda format, packs: (format, packs))
    monkeypatch.setattr(measure, "_product_rate", lambda w, repeats=5: rates[w])
    monkeypatch.setattr(measure, "read_bandwidth", lambda: 7.0)
    monkeypatch.setattr(library, "is_loaded", lambda: True)
    assert lookup.rates_now(["q4_0", "bfloat16"]) == (7.0, 5.0)
    assert measure.best_matmul_rate(["q4_0"]) == 4.0
    assert measure.matmul_rate("bfloat16") == 5.0
    monkeypatch.setattr(library, "is_loaded", lambda: False)
    assert measure.best_matmul_rate(["bfloat16"]) == measure.matmul_rate("bfloat16") == 3.0


def test_the_peak_of_a_format_is_of_what_multiplies_it():
    peaks = {"avx512vnni int8": 4.0, "avx512 float32": 2.0, "avx2 float32": 1.0}
    formats = "q4_0", "fp8", "bfloat16", "float32"
    reached = [measure.product_peak(format, peaks) for format in formats]
    assert reached == [4.0, 2.0, 2.0, 2.0]
    peaks["avx512bf16 bfloat16"] = 3.0
    assert measure.product_peak("bfloat16", peaks) == 3.0
    assert measure.product_peak("int8", {"avx2 float32": 1.0}) == 1.0
    assert measure.product_peak("bfloat16", {}) is None


OWN = {f.name: getattr(CONFIG.model, f.name) for f in dataclasses.fields(ModelConfig)}
TABLE, WIDTH = CONFIG.model.vocab_size * CONFIG.model.width, CONFIG.model.width


def drafting(proposer, draft, width=4, queries=4, model=CONFIG.model, **settings):
    """What drafts in a step of two rows, and FLOPs by name."""
    engine = EngineConfig.of(max_seqs=2, proposer=proposer, num_drafts=3, **settings)
    record = StepRecord(StepShape((2, width), (0, 32)), ((queries, 50),), 1.0, 0.0)
    found = speculation.drafting_operations(Config(model, engine, draft=draft), record)
    flops = {}
    for each in found:
        flops[each.name] = flops.get(each.name, 0) + each.flops
    return found, flops


def test_a_draft_model_runs_once_more_than_it_drafts():
    found, flops = drafting("draft", CONFIG.model)
    runs = [cost.step_operations(CONFIG.model, Work(2, (cost.Rows(1, 1, 47 + n),), 2))
            for n in range(4)]  # fmt: skip
    assert found == tuple(each for run in runs for each in run)
    assert flops["head"] == 4 * 2 * 2 * TABLE
    assert drafting("draft", CONFIG.model, width=1, queries=1)[0] == ()


def test_heads_read_their_own_table_once_a_draft():
    found, flops = drafting("medusa", Medusa(**OWN | {"num_layers": 0, "pattern": ()}))
    assert flops == {"medusa.block": 3 * 2 * 2 * WIDTH**2, "head": 3 * 2 * 2 * TABLE}
    _, fewer = drafting("medusa", Medusa(**OWN | {"num_layers": 0, "pattern": ()}), width=3)
    assert fewer["head"] == 2 * 2 * 2 * TABLE  # where the number of drafts adapts
    few = Medusa(**OWN | {"num_layers": 0, "pattern": ()}, proposed_ids=tuple(range(8)))
    assert drafting("medusa", few)[1]["head"] == 3 * 2 * 2 * 8 * WIDTH


def test_eagle_drafts_and_takes_in_what_was_fed():
    eagle = Eagle(**OWN | {"num_layers": 1, "pattern": CONFIG.model.layers[:1]}, features=(1, 2))
    _, flops = drafting("eagle", eagle)
    assert flops["head"] == 3 * 2 * 2 * TABLE  # one of two rows, three times
    assert flops["eagle.fuse"] == 2 * 8 * 2 * WIDTH**2  # all eight tokens, once
    assert flops["eagle.input"] == (3 * 2 + 8) * 2 * 2 * WIDTH**2
    _, alone = drafting("eagle", eagle, width=1, queries=1)
    assert {*alone} == {"eagle.fuse", "eagle.input", "attention.qkv", "embed"}
    _, tree = drafting("eagle", eagle, draft_tree=(0, 0, 1))
    assert tree["head"] == (2 + 2 * 2) * 2 * TABLE  # behind the newest token, and two children
    assert tree["eagle.input"] == (2 * 1 + 2 * 3 + 8) * 2 * 2 * WIDTH**2


def test_a_block_of_drafts_is_one_run():
    dflash = DFlash(**OWN | {"num_layers": 1, "pattern": CONFIG.model.layers[:1]}, features=(1, 2))
    found, flops = drafting("dflash", dflash)
    assert flops["head"] == 3 * 2 * 2 * TABLE  # behind the masks of two rows
    assert sum(each.name == "head" for each in found) == 1
    assert flops["dflash.fuse"] == 8 * 2 * 2 * WIDTH**2  # all eight tokens that were fed, once
    _, alone = drafting("dflash", dflash, width=1, queries=1)
    assert {*alone} == {"dflash.fuse", "attention.qkv"}


def test_a_layer_that_predicts_a_second_token_costs_what_it_declares():
    """It reads its model's table, holds none, and its latents lie beside those of the model."""
    model = fakes.deepseek()
    fields = {f.name: getattr(model, f.name) for f in dataclasses.fields(ModelConfig)}
    layer = Eagle(
        **fields | {"num_layers": 1, "pattern": model.layers[-1:]}, shares_head=True
    )  # fmt: skip
    found, flops = drafting("eagle", layer, model=model)
    assert flops["head"] == 3 * 2 * 2 * TABLE and flops["eagle.input"] == 14 * 2 * 2 * WIDTH**2
    kind, experts = model.layers[-1].mixer, model.layers[-1].ffn
    down = (kind.rank + kind.rope_width) * WIDTH
    assert flops["latent.kv_down"] == 14 * 2 * down  # three times two rows, and what was fed
    assert flops["experts.down"] == 3 * 2 * 2 * experts.top_k * experts.width * WIDTH
    visited = experts.num_experts * (1 - (1 - experts.top_k / experts.num_experts) ** 2)
    read = sum(each.weight_bytes for each in found if each.name == "experts.down")
    assert read == pytest.approx(3 * visited * experts.width * WIDTH * 4)
    _, alone = drafting("eagle", layer, width=1, queries=1, model=model)
    assert {*alone} == {"eagle.input", "latent.kv_down", "embed"}
    assert weights.weight_bytes(layer) == sum(
        4 * info.elements for _, info in params.leaves(layer.parameters())
    )
    engine = EngineConfig.of(max_seqs=2, proposer="eagle", num_drafts=3, cache_bytes=1 << 20)
    config = Config(model, engine, draft=layer)
    cache = jax.tree.leaves(kv_cache.abstract(*cache_arguments(config, "reference")))
    assert config.pool_bytes == sum(leaf.size * leaf.dtype.itemsize for leaf in cache)
    assert len(cache) == model.num_layers + 1


def test_a_step_is_predicted_with_what_drafts():
    def predicted(draft, proposer):
        engine = EngineConfig.of(max_seqs=2, proposer=proposer, num_drafts=3)
        record = StepRecord(StepShape((2, 4), (0, 32)), ((4, 50),), 1.0, 0.0)
        chip = dataclasses.replace(catalog.get("h100"), overhead_s=1.0)
        return decode_report.decode_steps(Config(CONFIG.model, engine, draft=draft), [record], chip)

    helped, alone = predicted(CONFIG.model, "draft"), predicted(None, "ngram")
    assert helped.step_bytes > 2 * alone.step_bytes
    assert 1.0 < alone.predicted_step_s < helped.predicted_step_s < 1.1
