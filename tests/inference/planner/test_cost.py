"""The cost model against figures worked out by hand, and against the declarations it predicts."""

import dataclasses
import math
from typing import NamedTuple

import jax
import pytest

from configs import presets
from configs.cache import DTYPE_BYTES
from configs.engine import Config, EngineConfig
from configs.hardware.spec import HardwareSpec
from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated, Plain
from configs.kinds.params import ParamInfo
from configs.model import LayerSpec, ModelConfig
from configs.precision import FORMATS, Format
from inference.planner import cost, report, roofline, weights
from inference.planner.calibration import measure
from inference.planner.cost import Cost, Precision, Rows, Work
from inference.scheduling.step_shapes import StepShape
from layers import decoder, kv_cache, params
from scripts.reports import decode_report

# D = 8, F = 16, 2 layers (one windowed), N = 4, K = 2, H = 3, V = 10.
_TINY = ModelConfig(
    "tiny", "llama", 10, width=8, num_layers=2, max_context=512, dtype="bfloat16",
    pattern=tuple(LayerSpec(Attention(4, 2, 3, None, window), Gated(16)) for window in (None, 4)),
)  # fmt: skip
_LAYER = (4 + 2 + 2) * 3 * 8 + 8 * 12 + 3 * 8 * 16  # qkv, out, gate, up and down: 672
_TABLE = 10 * 8
_NORMS = 2 * 2 * 8 + 8
_TOKEN_BYTES = 2 * 2 * 3 * 2  # keys and values of 2 heads of 3 elements of 2 bytes: 24


def machine(read_bandwidth: float, rate: float = math.inf) -> HardwareSpec:
    return HardwareSpec("test", math.inf, read_bandwidth, {"bfloat16": rate})


def operations(config, num_tokens, contexts, num_logits):
    rows = tuple(Rows(1, queries, context) for queries, context in contexts)
    return cost.step_operations(config, Work(num_tokens, rows, num_logits))


def step_cost(*args) -> Cost:
    return cost.total(operations(*args))


def activation_bytes(*args) -> float:
    return sum(operation.activation_bytes for operation in operations(*args))


# --- weights --------------------------------------------------------------------------------------


def test_parameters_by_hand():
    *matrices, vectors = weights.weight_groups(_TINY)
    assert sum(part.elements for part in matrices if part.format == "weights") == 2 * _LAYER == 1344
    assert vectors.elements == _NORMS == 40
    assert weights.num_parameters(_TINY) == 1344 + 40 + 160
    tied = dataclasses.replace(_TINY.with_kinds(qk_norm="head"), tied=True, post_norms=True)
    assert weights.num_parameters(tied) == 1344 + 2 * (4 * 8 + 2 * 3) + 8 + 80


_HEADS = Attention(4, 2, 4)
_BIASED = dataclasses.replace(_HEADS, biases=("qkv", "out"))


@pytest.mark.parametrize(
    ("layers", "changes"),
    [([(_BIASED, Gated(16, has_bias=True))], {"norm": "layer"}),
     ([(dataclasses.replace(_HEADS, qk_norm="all"), Gated(16))],
      {"pre_norms": False, "post_norms": True}),
     ([(dataclasses.replace(_HEADS, biases=("out",)), Plain(16)),
       (Attention(4, 2, 4, owner=0), Gated(16))], {}),
     ([(dataclasses.replace(_BIASED, qk_norm="all"), Gated(16, has_bias=True)),
       (dataclasses.replace(_BIASED, qk_norm="all", owner=0), None)], {}),
     ([(Attention(4, 2, 4, rope=None), Plain(16))], {"learned_positions": 512})],
)  # fmt: skip
def test_parts_of_other_families_are_counted(layers, changes):
    config = dataclasses.replace(
        _TINY, pattern=tuple(LayerSpec(*layer) for layer in layers), **changes
    )
    infos = jax.tree.leaves(decoder.param_infos(config), is_leaf=params.is_info)
    declared = sum(math.prod(info.shape) for info in infos)
    assert weights.num_parameters(config) == declared
    byte = Format("bytes", 8)
    assert weights.weight_bytes(config, Precision(byte, byte, byte)) == declared


@dataclasses.dataclass(frozen=True)
class _ExactGate(Plain):
    """A matrix and a vector that stay in float32 whatever the model's type."""

    def parameters(self, model):
        gate = ParamInfo((3, model.width), "float32", (None, "embed"))
        return super().parameters(model) | {
            "gate": gate, "shift": ParamInfo((3,), "float32", (None,), "zeros"),
        }  # fmt: skip


def test_a_parameter_keeps_the_format_that_it_names():
    config = dataclasses.replace(
        _TINY, dtype="bfloat16", pattern=(LayerSpec(_HEADS, _ExactGate(16)),)
    )
    own, int4 = Precision.of(config), FORMATS["int4"]
    assert weights.weight_bytes(config) == params.num_bytes(config.parameters())
    exact = 2 * 4 * (3 * 8 + 3)
    plain = dataclasses.replace(config, pattern=(LayerSpec(_HEADS, Plain(16)),))
    for weight in (own.weights, int4):
        precision = dataclasses.replace(own, weights=weight)
        rest_bytes = weights.weight_bytes(plain, precision)
        assert weights.weight_bytes(config, precision) == rest_bytes + exact
    moved = {
        of: sum(o.weight_bytes for o in cost.step_operations(of, Work.decode(1, 1)))
        for of in (config, plain)
    }
    assert moved[config] == moved[plain] + exact


@pytest.mark.parametrize(
    ("name", "published"),
    [("smollm2-135m", 134_515_008), ("gemma3-270m", 268_098_176), ("llama2-13b", 13_015_864_320),
     ("llama2-70b", 68_976_648_192), ("llama3-8b", 8_030_261_248), ("llama3-70b", 70_553_706_496),
     ("qwen2.5-0.5b", 494_032_768),
     ("mistral-7b", 7_241_732_096),
     ("qwen3-0.6b", 596_049_920),
     ("smollm3-3b", 3_075_098_624),
     ("gemma2-2b", 2_614_341_888),
     ("phi3-mini", 3_821_079_552),
     ("olmo2-1b", 1_484_916_736),
     ("gpt2", 124_439_808),
     ("mixtral-8x7b", 46_702_792_704),
     ("qwen1.5-moe-a2.7b", 14_315_784_192),
     ("qwen3-30b-a3b", 30_532_122_624),
     ("qwen3-235b-a22b", 235_093_634_560),
     ("olmoe-1b-7b", 6_919_161_856),
     ("deepseek-v2", 235_741_434_880),
     ("deepseek-v2-lite", 15_706_484_224),
     ("deepseek-v3", 671_026_419_200),
     ("deepseek-v3.2", 671_877_944_064),
     ("deepseek-v4-flash", 284_334_567_511),
     ("glm-4.5-air", 106_852_251_264),
     ("gpt-oss-20b", 20_914_757_184),
     ("gpt-oss-120b", 116_829_156_672),
     ("olmo3-7b", 7_298_011_136),
     ("gemma4-e2b", 4_628_569_379),
     ("gemma4-e4b", 7_463_013_418),
     ("gemma4-26b-a4b", 25_233_141_790),
     ("gemma4-31b", 30_697_345_340),
     ("granite4-h-small", 32_207_337_984),
     ("qwen3.6-35b-a3b", 34_660_610_688),
     ("minimax-m2", 228_689_764_864),
     ("gemma3-4b", 3_880_263_168),
     ("gemma4-12b", 11_907_350_320),
     ("ministral3-8b", 8_489_553_920)],
)  # fmt: skip
def test_parameters_of_every_preset(name, published):
    config = presets.get(name).config
    infos = jax.tree.leaves(decoder.param_infos(config), is_leaf=params.is_info)
    assert (
        weights.num_parameters(config) == sum(math.prod(info.shape) for info in infos) == published
    )
    exact = sum(math.prod(info.shape) for info in infos if info.format == "float32")  # it routes
    assert 2 * (published + exact) == params.num_bytes(decoder.param_infos(config))


def test_every_preset_is_counted():
    counted = test_parameters_of_every_preset.pytestmark[0].args[1]
    assert {name for name, _ in counted} == set(presets.NAMES)


# --- a step ---------------------------------------------------------------------------------------


def test_a_decode_step_by_hand():
    """Two rows, of 3 tokens (inside the window) and of 10; of which the last is new."""
    found = step_cost(_TINY, 2, [(1, 3), (1, 10)], 2)
    weights = (2 * _LAYER + _NORMS + _TABLE + 2 * 8) * 2  # of the embedding two rows are read
    read = (3 + 10) + (3 + 4)  # tokens of the first layer, of the windowed one
    written = 2 * 2
    moved = activation_bytes(_TINY, 2, [(1, 3), (1, 10)], 2)
    assert found.bytes == weights + (read + written) * _TOKEN_BYTES + moved
    matrices = 24 + 8 + 12 + 8 + 32 + 8 + 16 + 8  # inputs and outputs of the four of a layer
    mixing = 2 * 4 * 3  # queries and what they gathered
    elements = 2 * 2 * (matrices + mixing) + 2 * 8 + 2 * 8  # of the head, of the embedding
    assert moved == 2 * elements + 2 * 10 * 4 * 2  # logits are written and read
    products = 2 * 2 * (2 * _LAYER + _TABLE)
    attention = 4 * 4 * 3 * read  # scores and weighted sum of 4 heads of 3 elements
    assert found.flops == products + attention


def test_a_tied_table_is_read_once_and_whole():
    tied = operations(dataclasses.replace(_TINY, tied=True), 2, [], 0)
    assert sum(o.weight_bytes for o in tied) == 2 * (2 * _LAYER + _NORMS + _TABLE)
    assert step_cost(_TINY, 2, [], 0).bytes - cost.total(tied).bytes == 2 * 2 * 8


def test_a_prefill_step_by_hand():
    """The last 5 of 10 tokens: each query sees one key more, in the window at most 4."""
    found = step_cost(_TINY, 8, [(5, 10)], 1)
    seen = (6 + 7 + 8 + 9 + 10) + 5 * 4
    products = 2 * 8 * 2 * _LAYER + 2 * _TABLE  # padding is computed, logits only where sampled
    assert found.flops == products + 4 * 4 * 3 * seen
    weights = (2 * _LAYER + _NORMS + _TABLE + 8 * 8) * 2
    read = 10 + 8  # the window of the first query begins at position 2
    moved = activation_bytes(_TINY, 8, [(5, 10)], 1)
    assert found.bytes == weights + (read + 2 * 5) * _TOKEN_BYTES + moved


@pytest.mark.parametrize(
    ("queries", "context", "window", "pairs"),
    [(1, 1, None, 1), (1, 7, None, 7), (3, 7, None, 5 + 6 + 7), (4, 4, None, 10), (1, 7, 3, 3),
     (4, 4, 3, 1 + 2 + 3 + 3), (3, 3, 5, 6), (2, 9, 1, 2)],
)  # fmt: skip
def test_pairs_of_query_and_key(queries, context, window, pairs):
    layer = LayerSpec(Attention(4, 2, 3, None, window), Gated(16))
    alone = dataclasses.replace(_TINY, num_layers=1, pattern=(layer,))
    with_rows = step_cost(alone, 1, [(queries, context)], 1)
    assert with_rows.flops - step_cost(alone, 1, [], 1).flops == 4 * 4 * 3 * pairs


@pytest.mark.parametrize("sight", [{"first_tokens": 3}, {"chunked": True}])
@pytest.mark.parametrize("context", [1, 4, 5, 9, 12, 13, 40])
def test_first_tokens_and_chunks_are_counted_key_by_key(sight, context):
    """Beside a window of 4, or in chunks of 4."""
    mixer = Attention(4, 2, 3, None, 4, **sight)
    alone = dataclasses.replace(_TINY, num_layers=1, pattern=(LayerSpec(mixer, Gated(16)),))
    for queries in range(1, context + 1):
        asked = range(context - queries, context)
        if sight.get("chunked"):
            seen = [range(q // 4 * 4, q + 1) for q in asked]
        else:
            seen = [{*range(min(3, q + 1)), *range(max(0, q - 3), q + 1)} for q in asked]
        step, nothing = step_cost(alone, 1, [(queries, context)], 1), step_cost(alone, 1, [], 1)
        assert step.flops - nothing.flops == 4 * 4 * 3 * sum(map(len, seen))
        token = alone.cache_specs[0].bytes_per_entry(alone.dtype)
        assert step.bytes - nothing.bytes == token * (len(set().union(*seen)) + queries)


def test_predicted_bytes_are_allocated_bytes():
    """A full cache read once: what `kv_cache` allocates, its sink and the new token apart."""
    page = 16
    for name in ("smollm2-135m", "gemma3-270m", "deepseek-v2-lite"):
        for dtype in ("bfloat16", "float32", "int8", "fp8", "int4"):
            own = {"dtype" if dtype in DTYPE_BYTES else "cache_format": dtype}
            config = dataclasses.replace(presets.get(name).config, **own)
            tokens = min(spec.window or 512 for spec in config.cache_specs)
            pages = (tokens // page,) * len(config.page_groups)
            leaves = jax.tree.leaves(kv_cache.abstract(config, pages, page, 1, 0))
            allocated = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
            step = step_cost(config, 1, [(1, tokens)], 0)
            new = sum(spec.bytes_per_entry(dtype) for spec in config.cache_specs)
            assert step.bytes - step_cost(config, 1, [], 0).bytes == allocated + new


def test_window_groups_stop_growing():
    config = presets.get("gemma3-270m").config
    at = {n: step_cost(config, 1, [(1, n)], 1).bytes for n in (512, 513, 2048)}
    per_token = config.cache_specs[0].bytes_per_entry("bfloat16")
    assert at[513] - at[512] == 3 * per_token  # 3 global layers of 18
    assert at[2048] - at[512] == 3 * per_token * (2048 - 512)


def test_decoding_waits_for_memory_and_prefill_for_arithmetic():
    config = presets.get("llama3-8b").config
    chip = machine(1e12, 1e14)
    decode = step_cost(config, 1, [(1, 1000)], 1)
    found = report.seconds(config, operations(config, 1, [(1, 1000)], 1), chip)
    assert found == pytest.approx(decode.bytes / 1e12)
    assert decode.bytes == pytest.approx(2 * 7.5e9, rel=0.02)  # the embedding is not read
    prefill = step_cost(config, 4096, [(4096, 4096)], 1)
    needed = operations(config, 4096, [(4096, 4096)], 1)
    # A little is read where nothing is computed: norms, and rows of the embedding.
    assert 1 < report.seconds(config, needed, chip) / (prefill.flops / 1e14) < 1.005
    unlimited = report.seconds(config, needed, machine(1e12))
    assert unlimited == pytest.approx(prefill.bytes / 1e12)


def test_operations_hide_nothing_of_each_other():
    """Attention reads its cache before or after products compute: a step takes both."""
    config = presets.get("llama2-13b").config
    needed, chip = operations(config, 256, [(1, 1024)] * 256, 256), machine(4e12, 7e14)
    time = roofline.step_time(needed, chip, Precision.of(config))
    alone = [roofline.step_time((o,), chip, Precision.of(config)) for o in needed]
    assert {operation.bound for operation in alone} == {"memory", "compute"}
    assert time.total_s == pytest.approx(sum(operation.total_s for operation in alone))
    assert time.total_s > 1.04 * max(time.memory_s, time.compute_s)


# --- this machine ---------------------------------------------------------------------------------


def test_this_machine_is_measured():
    assert 1e8 < measure.read_bandwidth(8 << 20, repeats=2) < 1e13
    assert 1e8 < measure.matmul_rate("float32", repeats=2) < 1e15


def test_products_of_few_bits_are_measured_without_kernels(monkeypatch):
    monkeypatch.setattr("layers.kernels.cpu.library.is_loaded", lambda: False)
    assert 1e8 < measure.matmul_rate("int4", repeats=1) < 1e15


# --- predicted beside measured --------------------------------------------------------------------


class _Record(NamedTuple):
    shape: StepShape
    rows: tuple[tuple[int, int], ...]
    seconds: float


def test_report_takes_medians_of_steps_that_only_decode():
    config = Config(_TINY, EngineConfig(max_seqs=2))
    decode, mixed = StepShape((2, 1), (0, 64)), StepShape((2, 1), (1, 64))
    records = [
        _Record(mixed, ((64, 64),), 9.0),
        _Record(decode, ((1, 3), (1, 10)), 4e-3),
        _Record(decode, ((1, 4), (1, 11)), 1e-3),
        _Record(decode, ((1, 5), (1, 12)), 2e-3),
    ]
    report = decode_report.decode_steps(config, records, machine(1e6))
    expected = step_cost(_TINY, 2, [(1, 4), (1, 11)], 2).bytes
    assert report.step_bytes == expected
    assert report.predicted_step_s == pytest.approx(expected / 1e6)
    assert report.measured_step_s == 2e-3
    assert report.bandwidth_share == pytest.approx(expected / 2e-3 / 1e6)
    assert report.read_bandwidth == 1e6


def test_report_without_decode_steps():
    only_prefill = _Record(StepShape((0, 1), (1, 64)), ((64, 64),), 1.0)
    decode = decode_report.decode_steps(Config(_TINY), [only_prefill], machine(5.0))
    assert decode == decode_report.DecodeReport(None, None, None, 5.0, None)


def test_the_ladders_first_rung():
    """Without a cache every token runs all before it; with one, the prompt once and then itself."""
    chip = machine(math.inf, 1.0)  # seconds are FLOPs
    naive = report.naive_seconds(_TINY, chip, 120, 10, 128)
    short = step_cost(_TINY, 128, [(128, 128)], 1).flops
    long = step_cost(_TINY, 256, [(256, 256)], 1).flops
    assert naive == 9 * short + long  # the tenth new token runs 129 tokens
    cached = report.cached_seconds(Config(_TINY), chip, 120, 10)
    assert cached == step_cost(_TINY, 128, [(120, 120)], 1).flops + sum(
        step_cost(_TINY, 2, [(1, n)], 2).flops for n in range(121, 130)
    )
