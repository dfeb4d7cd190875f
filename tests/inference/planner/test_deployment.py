"""Plans: the physics that must hold whatever the model, the chip and the mesh."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs import presets
from configs.engine import Config
from configs.errors import InputError
from configs.hardware import catalog
from configs.hardware.spec import HardwareSpec
from configs.mesh import Mesh
from configs.model import LayerSpec
from configs.precision import CACHE_FORMATS, FORMATS
from inference.planner import cost, parts, roofline, weights
from inference.planner.cost import Precision, Work
from inference.planner.deployment import Deployment
from inference.planner.speculation import Speculation

_H100 = catalog.get("h100")
_MODELS = {name: presets.get(name).config for name in presets.NAMES | presets.PLANNED}
_LLAMA, _LATENT, _MIXTURE = (
    _MODELS[name] for name in ("llama2-13b", "deepseek-v2", "mixtral-8x7b")
)


def _vectors(config) -> int:
    """Weights that are no matrix."""
    return weights.weight_groups(config)[-1].elements


def formats(weights_name: str, cache_name: str = "bfloat16") -> Precision:
    return Precision(FORMATS[weights_name], CACHE_FORMATS[cache_name], FORMATS["bfloat16"])


# --- monotone -------------------------------------------------------------------------------------

_NAMES = st.sampled_from(sorted(_MODELS))
_SIZES = st.integers(1, 2048)


@given(_NAMES, _SIZES, _SIZES, _SIZES)
def test_more_sequences_and_longer_ones_cost_more(name, batch, context, more):
    placed = Deployment(_MODELS[name], _H100)
    most = placed.config.max_context // 2
    context, more = min(context, most), min(more, most)
    row = placed.row(batch, context)
    wider, longer = placed.row(batch + more, context), placed.row(batch, context + more)
    for other in (wider, longer):
        assert other.memory_bytes >= row.memory_bytes
        assert other.step_s >= row.step_s and other.ttft_s >= row.ttft_s
    assert wider.output_tok_s >= row.output_tok_s * (1 - 1e-12)
    assert placed.largest_batch(context) >= placed.largest_batch(context + more)


@given(_NAMES, _SIZES, _SIZES, st.sampled_from(["exact", "lecture"]))
def test_fewer_bits_cost_less(name, batch, context, accounting):
    context = min(context, _MODELS[name].max_context)
    rows = [
        Deployment(_MODELS[name], _H100, formats(*bits), accounting=accounting).row(batch, context)
        for bits in (("float32", "float32"), ("bfloat16", "bfloat16"), ("w8a8", "bfloat16"),
                     ("w8a8", "int8"), ("int4", "int4"))
    ]  # fmt: skip
    for more, fewer in itertools.pairwise(rows):
        assert fewer.memory_bytes <= more.memory_bytes
    *steps, int4 = (row.step_s for row in rows)
    assert steps == sorted(steps, reverse=True)
    assert int4 <= steps[1]  # computes in bfloat16, which w8a8 does not


def test_eight_bits_compute_at_their_own_rate_where_the_chip_has_one():
    """A prompt waits for arithmetic: half as long on v5e, no shorter in four bits or on v7x."""
    config = presets.get("llama3-8b").config

    def ttft_s(chip: str, weights: str) -> float:
        placed = Deployment(config, catalog.get(chip), formats(weights, "bfloat16"))
        return placed.row(1, 4096).ttft_s

    plain = ttft_s("v5e", "bfloat16")
    assert ttft_s("v5e", "w8a8") < 0.6 * plain
    assert ttft_s("v5e", "int4") > 0.9 * plain
    assert ttft_s("v7x", "w8a8") > 0.9 * ttft_s("v7x", "bfloat16")
    assert ttft_s("v7x", "w8a8_fp8") < 0.6 * ttft_s("v7x", "bfloat16")


@given(_NAMES, st.integers(1, 4096))
def test_the_largest_batch_fits_and_one_more_does_not(name, context):
    chip = dataclasses.replace(_H100, memory_bytes=2e12)
    placed = Deployment(_MODELS[name], chip, mesh=Mesh(data=2))
    context = min(context, placed.config.max_context)
    largest = placed.largest_batch(context)
    assert largest > 0 and largest % 2 == 0
    assert placed.row(largest, context).fits and not placed.row(largest + 1, context).fits
    assert placed.row(largest, context).chip_bytes <= 2e12


def test_a_model_larger_than_its_chip_holds_nothing():
    placed = Deployment(_MODELS["llama2-70b"], _H100)
    assert placed.largest_batch(1) == 0 and not placed.row(1, 1).fits


# --- one chip and several -------------------------------------------------------------------------


def test_one_chip_exchanges_nothing():
    for config in (_LLAMA, _MIXTURE):
        assert Deployment(config, _H100).decode_time(8, 512).collective_s == 0
        grouped = Deployment(config, _H100, mesh=Mesh(data=4))
        assert grouped.decode_time(8, 512).collective_s == 0


def test_all_reduces_by_hand():
    """Two a layer and one of the embedding; a ring of 4 moves 2 x 3/4 of float32 [T, D] in 6 turns.
    Sampling sums a word a row, and gathers three of each chip.
    """
    work = Work.decode(16, 512)
    chip = dataclasses.replace(_H100, link_bandwidth=1e9, link_latency_s=1e-6)
    seconds = Deployment(_LLAMA, chip, mesh=Mesh(model=4)).collective_seconds(work)
    sampled = 1.5 * 16 * 4 / 1e9 + 6e-6 + 0.75 * 4 * 16 * 12 / 1e9 + 3e-6
    assert seconds == pytest.approx(81 * (1.5 * 16 * 5120 * 4 / 1e9 + 6e-6) + sampled)
    torus = dataclasses.replace(chip, link_axes=2)  # whose other axis the ring does not use
    seconds = Deployment(_LLAMA, torus, mesh=Mesh(model=4)).collective_seconds(work)
    sampled = 1.5 * 16 * 4 / 0.5e9 + 6e-6 + 0.75 * 4 * 16 * 12 / 0.5e9 + 3e-6
    assert seconds == pytest.approx(81 * (1.5 * 16 * 5120 * 4 / 0.5e9 + 6e-6) + sampled)


@pytest.mark.parametrize("chip", ["h100", "a100", "v6e"])
@pytest.mark.parametrize(
    ("name", "chips"), [("llama3-8b", 1), ("llama3-8b", 8), ("deepseek-v2", 2)]
)
def test_a_page_is_planned_as_large_as_a_chip_allocates_it(name, chips, chip):
    """Llama's eight heads in int8 are 2,112 bytes, of one chip of eight 264: on Hopper and TPUs
    2,176 and 384. DeepSeek's latents have 576 elements, on TPUs 640.
    """
    hardware, mesh = catalog.get(chip), Mesh(model=chips)
    for cache in ("bfloat16", "int8", "fp8", "int4"):
        format = None if cache == "bfloat16" else cache
        config = Config(dataclasses.replace(_MODELS[name], cache_format=format), mesh=mesh)
        there = config.for_platform(catalog.platform(chip), bool(hardware.padded_caches))
        lanes, page = there.engine.cache.row_multiple, there.page_tokens
        planned = Deployment(there.model, hardware, formats("bfloat16", cache), mesh)
        assert sum(there.cached_model.page_bytes(page, lanes)) == planned.chip_cache_bytes(page)
    if name == "llama3-8b":
        padded = {1: 2176, 8: 384} if chip != "a100" else {1: 2112, 8: 264}
        layer_bytes = Deployment(_MODELS[name], hardware, formats("bfloat16", "int8"), mesh)
        assert layer_bytes.chip_cache_bytes(1) == 32 * padded[chips]


def test_heads_and_columns_are_divided_and_key_value_heads_copied_beyond_their_number():
    config = _MODELS["llama2-70b"]  # 8 key/value heads
    one, eight, sixteen = (Deployment(config, _H100, mesh=Mesh(model=n)) for n in (1, 8, 16))
    assert eight.chip_cache_bytes(512) == one.cache_bytes(512) / 8
    assert sixteen.chip_cache_bytes(512) == one.cache_bytes(512) / 8
    divided = one.weight_bytes - 2 * _vectors(config)
    assert eight.chip_weight_bytes == pytest.approx(divided / 8 + 2 * _vectors(config))
    memory = [placed.decode_time(64, 512).memory_s for placed in (one, eight, sixteen)]
    assert memory[1] == pytest.approx(memory[0] / 8, rel=1e-3)
    assert memory[1] > memory[2] > memory[1] / 2  # each still reads a whole head


def test_rows_of_key_value_heads_are_copied_beyond_their_number():
    """On 16 chips each holds 4 of 64 query heads, and one of 8 for keys and one for values."""
    config = _MODELS["llama2-70b"]
    placed = Deployment(config, _H100, mesh=Mesh(model=16))
    (qkv,) = (o for o in placed.decode_operations(4, 64) if o.name == "attention.qkv")
    found = roofline.per_chip(qkv, placed.mesh)
    rows = (4 + 2) * 128
    assert found.weight_bytes == pytest.approx(80 * rows * 8192 * 2)
    assert found.flops == pytest.approx(80 * 2 * 4 * rows * 8192)
    whole = 2 * _vectors(config)
    even = (placed.weight_bytes - whole) / 16
    assert placed.chip_weight_bytes - whole - even == pytest.approx(80 * 2 * 64 * 8192 * 2)


def test_what_an_operation_runs_as_does_not_hang_on_its_name():
    kinds = {o.name: o.kind for o in Deployment(_MIXTURE, _H100).decode_operations(1, 1)}
    assert kinds == dict.fromkeys(kinds, "matrix") | {"attend": "attention"} | dict.fromkeys(
        ("head", "embed", "vectors"), "other"
    )
    (attend,) = (
        o for o in Deployment(_LLAMA, _H100).decode_operations(1, 1) if o.kind == "attention"
    )
    renamed = dataclasses.replace(attend, name="mixer.mix", weight_bytes=1.0)
    fp8, chip = formats("fp8"), dataclasses.replace(_H100, attention_share=0.5)
    assert roofline.compute_type(renamed, fp8, chip) == "bfloat16"
    same = (roofline.step_time((o,), chip, fp8).compute_s for o in (attend, renamed))
    assert next(same) == next(same)


@pytest.mark.parametrize("share", [0.5, 2.0])
def test_what_attention_gathers_of_few_bits_has_many(share):
    """Copies are of the activations' type; without copies bits are read as they are."""
    chip = dataclasses.replace(_H100, cache_share=share)
    few = formats("bfloat16", "int8")
    (attend,) = (
        o for o in Deployment(_LLAMA, chip, few).decode_operations(4, 512) if o.kind == "attention"
    )
    stored = attend.cache_bytes
    gathered = stored * (2 / (1 + 2 / 64) if share < 1 else 1)
    expected = attend.activation_bytes + stored + gathered * (1 / share - 1)
    seconds = roofline.step_time((attend,), chip, few).memory_s
    assert seconds == pytest.approx(expected / chip.read_bandwidth)


def test_a_latent_vector_is_copied_on_every_chip():
    alone, together = (Deployment(_LATENT, _H100, mesh=Mesh(model=n)) for n in (1, 8))
    assert together.chip_cache_bytes(512) == alone.cache_bytes(512) == 60 * 576 * 2 * 512


def test_data_parallel_groups_hold_the_weights_and_share_the_sequences():
    one, two = (Deployment(_LLAMA, _H100, mesh=Mesh(data=n)) for n in (1, 2))
    assert two.largest_batch(1024) == 2 * one.largest_batch(1024)
    assert two.decode_time(64, 512) == one.decode_time(32, 512)
    assert two.row(64, 512).output_tok_s == pytest.approx(2 * one.row(32, 512).output_tok_s)
    for accounting in ("lecture", "exact"):
        apart = Deployment(_LLAMA, _H100, replicas=2, accounting=accounting)
        group = Deployment(_LLAMA, _H100, mesh=Mesh(data=2), accounting=accounting)
        assert apart.row(32, 512).output_tok_s == pytest.approx(group.row(64, 512).output_tok_s)


def test_biases_of_experts_are_divided_as_experts_are():
    config = _MODELS["gpt-oss-20b"]  # 24 layers, 32 experts, 2,880 columns
    placed = [Deployment(config, _H100, mesh=mesh) for mesh in (Mesh(expert=4), Mesh(1, 2, 4))]
    chip_bytes = [weights.weight_bytes(config.per_chip(n, 4)) for n in (1, 2)]
    assert placed[0].chip_weight_bytes == chip_bytes[0]
    whole = 24 * ((64 + 2 * 8) * 64 * 2 + 64 * 4)  # biases and sinks of heads
    assert placed[1].chip_weight_bytes == chip_bytes[1] + whole / 2
    biases = 2 * 24 * 32 * 2 * 2880, 2 * 24 * 32 * 2880
    work = [o for o in placed[0].decode_operations(16, 1) if o.name == "experts.vectors"]
    for mesh, chips in ((Mesh(), (1, 1)), (Mesh(expert=4), (4, 4)), (Mesh(1, 2, 4), (8, 4))):
        read = [roofline.per_chip(found, mesh).weight_bytes for found in work]
        assert read == [size / n for size, n in zip(biases, chips, strict=True)]


def test_expert_parallel_chips_divide_experts_and_sequences():
    one, four = (Deployment(_MIXTURE, _H100, mesh=Mesh(expert=n)) for n in (1, 4))
    experts = 2 * 32 * 8 * 3 * 14_336 * 4096
    assert four.chip_weight_bytes == pytest.approx(one.weight_bytes - experts * 3 / 4)
    assert four.largest_batch(1024) % 4 == 0
    work = four.decode_operations(64, 512)
    (read,) = (o for o in work if o.name == "attend")
    assert roofline.per_chip(read, four.mesh).cache_bytes == read.cache_bytes / 4
    assert roofline.per_chip(read, four.mesh).flops == read.flops / 4
    assert four.decode_time(64, 512).collective_s > 0
    # One prompt has nobody to share attention with.
    prompt = cost.step_operations(_MIXTURE, four.prefill_work(1, 512))
    (alone,) = (o for o in prompt if o.name == "attend")
    assert roofline.per_chip(alone, four.mesh).flops == alone.flops
    (gate,) = (o for o in prompt if o.name == "experts.gate_up")
    assert roofline.per_chip(gate, four.mesh).flops == gate.flops / 4


@pytest.mark.parametrize("tokens, expected", [(1, 2.0), (2, 3.5), (1000, 8.0)])
def test_expected_experts_touched(tokens, expected):
    """8 (1 - (3/4)^T): what T tokens miss that visit 2 of 8 evenly."""
    work = Work.decode(tokens, 1)
    (gate_up,) = (o for o in cost.step_operations(_MIXTURE, work) if o.name == "experts.gate_up")
    assert gate_up.weight_bytes == pytest.approx(expected * 32 * 2 * 14_336 * 4096 * 2)


def test_chips_without_links_make_no_mesh():
    lonely = HardwareSpec("lonely", 80e9, 1e12, {"bfloat16": 1e14})
    with pytest.raises(InputError, match="lonely has no links: its mesh is one chip"):
        Deployment(_LLAMA, lonely, mesh=Mesh(model=2))
    assert Deployment(_LLAMA, lonely, replicas=2).row(1, 1).fits


# --- accountings ----------------------------------------------------------------------------------


def test_the_lecture_reads_everything_once_and_waits_for_nothing_else():
    placed = Deployment(_LLAMA, _H100, accounting="lecture")
    row = placed.row(10_000, 16)
    assert row.step_s == row.memory_bytes / 3.35e12
    assert placed.prefill_time(1, 1000).total_s == pytest.approx(
        2 * 1000 * weights.num_active_parameters(_LLAMA) / 989e12
    )
    mixture = Deployment(_MIXTURE, _H100, accounting="lecture")
    assert mixture.row(1, 1).step_s > Deployment(_MIXTURE, _H100).row(1, 1).step_s  # of 8, 2


@pytest.mark.parametrize("drafts", [0, 3])
def test_intensity_is_the_accountings_own(drafts):
    speculation = Speculation(drafts, 0.5, 0.1) if drafts else None
    placed = Deployment(_LLAMA, _H100, speculation=speculation, accounting="lecture")
    row = placed.row(16, 1024)
    flops = 2 * 16 * (1 + drafts) * weights.num_active_parameters(_LLAMA)
    assert row.intensity == pytest.approx(flops / row.memory_bytes)


def test_the_ridge_is_where_steps_reach_it():
    chip = dataclasses.replace(_H100, bandwidth_share=0.8, rate_share=0.6)
    assert chip.ridge() == pytest.approx(_H100.ridge() * 0.75)
    found = parts.explain(Deployment(_LLAMA, chip), 1, 1)
    assert {found.ridge, *(part.ridge for part in found.decode.operations)} == {chip.ridge()}


def test_intensity_of_prefill_and_decode():
    """A matrix does a FLOP a byte for each token, attention S/2 in prefill and 1 in decode (the
    notes: ST / (S + T)).
    """
    found = parts.explain(Deployment(_LLAMA, _H100), 1, 4096)
    decode = {part.operation: part.intensity for part in found.decode.operations}
    prefill = {part.operation: part.intensity for part in found.prefill.operations}
    assert decode["ffn.down"] == pytest.approx(1, rel=0.01)
    assert decode["attend"] == pytest.approx(4096 / 4097, rel=0.01)
    assert prefill["ffn.down"] > 1000
    # Half of the pairs are masked, keys and values are written as well as read.
    assert 4096 / 8 < prefill["attend"] < 4096 / 2
    assert {part.bound for part in found.decode.operations} == {"memory"}
    assert found.prefill.time.bound == "compute"


def test_a_step_is_the_sum_of_its_parts():
    placed = Deployment(_MODELS["granite4-h-small"], _H100, mesh=Mesh(model=2, expert=2))
    found = parts.explain(placed, 16, 512).decode
    memory, compute = found.time.memory_s, found.time.compute_s
    assert sum(p.bytes for p in found.operations) / 3.35e12 == pytest.approx(memory)
    assert sum(p.flops for p in found.operations) / 989e12 == pytest.approx(compute)


def test_latent_attention_is_absorbed_in_prefill_too():
    """Keys are the latent 512 and 64 elements, values the 512."""
    prefill, decode = (
        next(o for o in cost.step_operations(_LATENT, work) if o.name == "attend.latent").flops
        for work in (Work.prefill(1, 1000), Work.decode(1, 1000))
    )
    assert prefill == 60 * 2 * 128 * (2 * 512 + 64) * 1000 * 1001 / 2
    assert decode == 60 * 2 * 128 * (2 * 512 + 64) * 1000


def test_sparse_prefill_sees_all_until_there_are_more_than_it_takes():
    """Query i of 3,000 attends to min(i, 2048) keys: 2,048 queries to 1, 2, ..., 952 to 2,048."""
    config, length = _MODELS["deepseek-v3.2"], 3000
    (found,) = (o for o in cost.step_operations(config, Work.prefill(1, length))
                if o.name == "attend.latent")  # fmt: skip
    pairs = 2048 * 2049 // 2 + 952 * 2048
    scored = length * (length + 1) // 2 * 2 * 64 * 128
    assert found.flops == 61 * (pairs * 2 * 128 * (2 * 512 + 64) + scored)


def test_states_are_read_once_and_written_for_every_draft():
    config = _MODELS["mamba2-2.7b"]
    state = 64 * 4 * config.cache_specs[0].elements_per_sequence

    def moved(work: Work) -> float:
        return next(o for o in cost.step_operations(config, work) if o.name == "recur").cache_bytes

    assert moved(Work.decode(3, 100)) == 3 * 2 * state
    assert moved(Work.decode(3, 100, drafts=4)) == 3 * (1 + 5) * state
    assert moved(Work.prefill(3, 100)) == 3 * 2 * state  # a chunk keeps its last


def test_the_prefill_gives_the_first_token():
    placed = Deployment(_LLAMA, _H100)
    assert placed.row(4, 100).request_s is None
    assert placed.row(4, 100, 1).request_s == placed.row(4, 100).ttft_s
    row = placed.row(4, 100, 11)
    assert row.request_s == pytest.approx(row.ttft_s + 10 * row.tpot_s)


def test_shared_and_windowed_and_sparse_caches():
    own = _LLAMA.layers[0]
    mixers = (dataclasses.replace(own.mixer, owner=i - 1 if i % 2 else None) for i in range(40))
    crossed = dataclasses.replace(_LLAMA, pattern=tuple(LayerSpec(m, own.ffn) for m in mixers))
    assert cost.cache_bytes(crossed, 100) == cost.cache_bytes(_LLAMA, 100) / 2
    windowed = _LLAMA.with_kinds(window=64)
    assert cost.cache_bytes(windowed, 1000) == cost.cache_bytes(_LLAMA, 64)
    sparse = _MODELS["deepseek-v3.2"]
    reads = [
        next(o for o in cost.step_operations(sparse, Work.decode(1, length))
             if o.name == "attend.latent").cache_bytes for length in (4096, 8192)
    ]  # fmt: skip
    assert reads[1] - reads[0] == 61 * 4096 * 128 * 2  # the indexer's keys alone


def test_layers_that_mix_alike_are_one_operation():
    """Hunyuan-Large: every second of 64 layers reads the cache of the layer before."""
    operations = cost.step_operations(_MODELS["hunyuan-large"], Work.decode(4, 100))
    own, shared_ = (o for o in operations if o.name == "attend")
    assert own.layers == shared_.layers == 32
    assert shared_.cache_bytes / own.cache_bytes == pytest.approx(100 / 101)  # it writes nothing


# --- drafts ---------------------------------------------------------------------------------------


def test_a_verified_step_is_longer_and_drafts_are_paid_in_plain_steps():
    drafts = Speculation(4, 0.8, 0.1)
    plain = Deployment(_LLAMA, _H100)
    placed = dataclasses.replace(plain, speculation=drafts)
    for batch in (1, 256):
        usual = plain.decode_time(batch, 1024).total_s
        verify = placed.decode_time(batch, 1024).total_s
        assert verify > usual
        assert placed.step_seconds(batch, 1024) == pytest.approx(verify + 0.4 * usual)
    gains = [
        placed.row(batch, context).output_tok_s / plain.row(batch, context).output_tok_s
        for batch, context in ((1, 1024), (2048, 16))
    ]
    assert 2.3 < gains[0] < drafts.speedup < 2.41  # near what reading alone gives
    assert gains[1] < 1  # where arithmetic bounds, drafts cost more than they bring


def test_a_draft_model_takes_memory():
    free, held = (
        Deployment(_LLAMA, _H100, speculation=Speculation(4, 0.8, 0.1, size)) for size in (0, 0.1)
    )
    assert held.weight_bytes == pytest.approx(1.1 * free.weight_bytes)
    assert held.largest_batch(1024) < free.largest_batch(1024)


def test_prices():
    chip = dataclasses.replace(_H100, price_per_hour=3.6)
    row = Deployment(_LLAMA, chip, mesh=Mesh(model=2), replicas=3).row(16, 1024)
    assert row.dollars_per_million == pytest.approx(6 * 1e-3 / row.output_tok_s * 1e6)
    assert Deployment(_LLAMA, _H100).row(1, 1).dollars_per_million is None


def test_sizes_out_of_range():
    placed = Deployment(_LLAMA, _H100)
    for sizes, words in (((0, 1), "batch is at least 1"), ((1, 0), "context is at least 1"),
                         ((1, 1, -1), "new_tokens is at least 0"),
                         ((1, 4096, 1), "at most the 4096 tokens of llama2-13b")):  # fmt: skip
        with pytest.raises(InputError, match=words):
            placed.row(*sizes)
    assert math.isfinite(placed.row(1, 4095, 1).request_s)
