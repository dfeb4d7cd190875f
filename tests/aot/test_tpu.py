"""Programs compiled for TPUs by libtpu, without one. A kernel that compiles fits its memory."""

import dataclasses
import re

import jax
import pytest

from configs import presets
from configs.engine import Config, EngineConfig
from configs.hardware import targets
from configs.mesh import Mesh
from inference.planner.compiled.report import AbsentEngine
from layers.backends.tpu import Tpu
from layers.kernels.attention import tpu
from tests.aot import cycles, launches, low_bit, programs, recurrence

pytestmark = pytest.mark.aot

_TOPOLOGIES = ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"]


@pytest.mark.parametrize("topology", _TOPOLOGIES)
@pytest.mark.parametrize("attention", ["reference", "jax_tpu", "pallas_tpu"])
@pytest.mark.parametrize("shape", [programs.DECODE, programs.MIXED], ids=["decode", "mixed"])
def test_the_step_keeps_its_cache_in_place(shape, attention, topology):
    """Small arrays are padded to tiles there, so slots take more than their elements."""
    device = programs.device(topology)
    executable, cache, slots = programs.compiled_step(device, shape, 128, attention)
    kernels = {"jax_tpu": "ragged_paged_attention_kernel", "pallas_tpu": "paged_attention"}
    called = set(re.findall(r"%(\w*paged_attention\w*)[.\d]* =", executable.as_text()))
    assert called == {kernels[attention]} if attention in kernels else not called
    memory, owned = executable.memory_analysis(), programs.num_bytes((cache, slots))
    assert owned <= memory.alias_size_in_bytes < owned + programs.MEGABYTE
    assert memory.temp_size_in_bytes < 128 * programs.MEGABYTE
    assert not programs.copies(executable, cache[0].pages)


@pytest.mark.parametrize("mixer", [programs.SPARSE, programs.HEAVY], ids=["sparse", "heavy"])
def test_entries_of_several_tokens_stay_in_place(mixer):
    programs.check_entries(programs.device("v6e:2x2"), mixer, 128)


def test_latents_that_queries_choose_from_stay_in_place():
    """The reference's: rows of 576 would be laid out by columns, and all pages copied."""
    programs.check_entries(programs.device("v6e:2x2"), programs.INDEXED, 64)


def test_a_greedy_step_has_few_launches_and_no_branch():
    """Twelve a layer: the root of each norm, four products, one of them laid out anew, rotated
    queries and keys, values, the kernel, its output as rows.
    """
    device = programs.device("v6e:2x2")
    one, two = (programs.counted(device, programs.DECODE, 128, "pallas_tpu", n) for n in (1, 2))
    programs.check_the_host_never_waits(two)
    added = programs.launches_a_layer(one, two)
    print(added, two.launches)
    assert sum(added.values()) <= 12
    assert two.launches["sample"] <= 10  # no parameter is read


def _rare(*case):
    return pytest.param(*case, marks=pytest.mark.long)


@pytest.mark.parametrize("format, rows, most", [
    ("bfloat16", 1, 13), _rare("bfloat16", 2, 12), _rare("bfloat16", 8, 12), ("bfloat16", 16, 12),
    ("int8", 1, 19), _rare("int8", 2, 12), _rare("int8", 8, 12), _rare("int8", 16, 12),
    _rare("int4", 1, 20), _rare("int4", 2, 20), _rare("int4", 8, 20), ("int4", 16, 17),
])  # fmt: skip
def test_a_layer_has_few_launches(format, rows, most):
    """A lone row has numbers of the norms' roots in addition, which the scalar unit computes, and
    no product on vector units, by which XLA expects to take 3.5 times as many cycles.
    """
    one, two = (launches.of_step("v6e:1x1", "llama3-8b", format, rows, n) for n in (1, 2))
    for launch in two:
        if "layer_1/" in launch.op_name:
            print(launch.name, launch.opcode, launch.shape, launch.op_name)
    print(f"{format}, {rows} rows: {len(two) - len(one)} launches a layer")
    assert len(two) - len(one) <= most
    expected = sum(
        int(cycles) for launch in two if "layer_1/" in launch.op_name
        for cycles in re.findall(r'"estimated_cycles":"(\d+)"', launch.text)
    )  # fmt: skip
    print(f"{expected} cycles by XLA, without kernels")
    assert expected < 620_000


def test_a_step_that_draws_has_no_branch():
    step = programs.counted(programs.device("v6e:2x2"), programs.SAMPLED, 128, "pallas_tpu", 1)
    print(step.launches)
    programs.check_the_host_never_waits(step)


@pytest.mark.parametrize("topology", _TOPOLOGIES)
@pytest.mark.parametrize("attention", ["jax_tpu", "pallas_tpu"])
def test_the_largest_page_tables_fit_scalar_memory(attention, topology):
    """As many entries as are not refused."""
    rows = tpu._TABLE_ENTRIES * 16 // 4096
    case = _LLAMA._replace(rows=rows, page_tokens=16)
    assert programs.compiled_attention(programs.device(topology), attention, case)


_LLAMA = programs.Attention(32, 1, (32, 8), 128, 128)
_CASES = {
    "llama3-8b, alone": _LLAMA._replace(rows=1),
    "llama3-8b, small pages": _LLAMA._replace(page_tokens=16),
    "llama3-8b, float32": _LLAMA._replace(dtype="float32"),
    "llama3-8b, drafts": _LLAMA._replace(width=5),
    "llama3-8b, trees and sinks": _LLAMA._replace(width=16, window=128, has_trees=True),
    "llama3-8b, prefill": _LLAMA._replace(rows=4, width=256),
    "llama2-13b": _LLAMA._replace(rows=16, heads=(40, 40)),
    "smollm2-135m, window": programs.Attention(8, 1, (9, 3), 64, 128, 512),
    "gemma2": programs.Attention(8, 1, (8, 4), 256, 128, 4096, 50.0),
    "gemma4-26b-a4b": programs.Attention(8, 1, (16, 2), 512, 128),
    "gemma4-31b, prefill": programs.Attention(4, 256, (32, 4), 512, 128),
    "llama3-8b, int8": _LLAMA._replace(cache="int8"),
    "llama3-8b, fp8, drafts": _LLAMA._replace(width=5, cache="fp8"),
    "llama3-8b, int8, prefill": _LLAMA._replace(rows=4, width=256, cache="int8"),
    "smollm2-135m, int8": programs.Attention(8, 1, (9, 3), 64, 128, cache="int8"),
}


def _needed(case):
    """Bytes of the kernel's operands: queries, output in the pages' dtype and as float32, a head's
    rows padded to tiles, and the groups of tokens that new keys and values may lie in.
    """
    rows, width, (N, K), H = case[:4]
    size = 4 if case.dtype == "float32" else 2
    head_rows = -(-width * N // K // tpu._ROWS) * tpu._ROWS
    groups = (width + tpu._GROUP - 2) // tpu._GROUP + 1
    appended = groups * tpu._GROUP * 2 * K * H * size
    output = 4 if size == 4 else size + 4
    return rows * (K * head_rows * H * (size + output) + appended)


@pytest.mark.parametrize("topology", _TOPOLOGIES)
@pytest.mark.parametrize("case", _CASES)
def test_the_kernel_fits_and_keeps_the_cache_in_place(case, topology):
    device = programs.device(topology)
    executable, pages = programs.compiled_attention(device, "pallas_tpu", _CASES[case])
    memory = executable.memory_analysis()
    assert memory.alias_size_in_bytes == programs.num_bytes(pages)
    assert memory.temp_size_in_bytes < _needed(_CASES[case]) + programs.MEGABYTE // 2
    assert not programs.copies(executable, pages)
    assert " scatter(" not in executable.as_text()  # the kernel appends


# Cycles of 512 cached tokens at most, a few percent above what is counted.
_CYCLES = {
    ("v5e", "decode"): 1100, ("v5e", "prefill"): 12_300,
    ("v6e", "decode"): 1120, ("v6e", "prefill"): 7800,
}  # fmt: skip


@pytest.mark.parametrize("chip, case", _CYCLES)
def test_a_block_takes_few_cycles(chip, case):
    """Decoding computes in less than half of the time that its copies take."""
    block = cycles.count(cycles.OURS, case, chip)
    print(chip, case, block)
    assert block["cycles"] <= _CYCLES[chip, case]
    assert case != "decode" or block["cycles"] <= 0.5 * block["copy_cycles"]


@pytest.mark.parametrize("chip, case", _CYCLES)
def test_a_block_takes_about_as_many_cycles_as_tpu_inference(chip, case):
    if (reason := cycles.limit(cycles.THEIRS)) is not None:
        pytest.skip(f"{cycles.THEIRS} {reason}")
    ours, theirs = (cycles.count(name, case, chip) for name in (cycles.OURS, cycles.THEIRS))
    ratio = ours["cycles"] / theirs["cycles"]
    print(f"{chip} {case}: {ours['cycles']} cycles, {ratio:.2f} of tpu-inference's")
    assert ratio <= (1.1 if case == "decode" else 1.2)


_DEEPSEEK = programs.Latents(32, 1, 128, 512, 64, 128)
_LATENTS = {
    "deepseek-v3": _DEEPSEEK,
    "deepseek-v3, small pages": _DEEPSEEK._replace(rows=1, page_tokens=16),
    "deepseek-v3, float32": _DEEPSEEK._replace(dtype="float32"),
    "deepseek-v3, one chip of eight": _DEEPSEEK._replace(num_heads=16),
    "deepseek-v3, drafts": _DEEPSEEK._replace(width=3),
    "deepseek-v3, trees": _DEEPSEEK._replace(num_heads=16, width=16, has_trees=True),
    "deepseek-v3, prefill": _DEEPSEEK._replace(rows=2, width=256),
    "narrow latents": _DEEPSEEK._replace(num_heads=16, rank=128),
    "deepseek-v3, int8": _DEEPSEEK._replace(cache="int8"),
    "deepseek-v3, fp8": _DEEPSEEK._replace(num_heads=16, width=3, cache="fp8"),
}


@pytest.mark.parametrize("topology", _TOPOLOGIES)
@pytest.mark.parametrize("case", _LATENTS)
def test_the_kernel_reads_and_appends_latents_in_place(case, topology):
    """Rows of 576 elements are stored in 640, so that they take what their shape says."""
    latents = _LATENTS[case]
    executable, pages = programs.compiled_latents(programs.device(topology), "pallas_tpu", latents)
    memory, size = executable.memory_analysis(), 4 if latents.dtype == "float32" else 2
    assert memory.alias_size_in_bytes == programs.num_bytes(pages)
    tokens = latents.rows * latents.width
    queries = tokens * (latents.num_heads + 2 * tpu._GROUP) * pages.shape[2] * size
    print(f"{case}: {memory.temp_size_in_bytes} bytes of temporaries, {queries} of queries")
    out = tokens * latents.num_heads * latents.rank * (size + 4)
    assert memory.temp_size_in_bytes < 2 * queries + out + programs.MEGABYTE
    assert not programs.copies(executable, pages)
    assert " scatter(" not in executable.as_text()  # the kernel appends


@pytest.mark.parametrize("target", ["v5e:1x1", "v5e:2x2", "tpu7x:2x2x1"])
def test_the_report_agrees_with_the_planner(target):
    programs.check_report(target, "pallas_tpu")


@pytest.mark.parametrize("target, name, mesh", [
    ("v5e:1x1", "deepseek-v2-lite", Mesh()), ("v5e:2x4", "deepseek-v2-lite", Mesh(model=8)),
    ("v5e:2x4", "deepseek-v2-lite", Mesh(expert=8)),
    ("v5p:2x2x2", "deepseek-v2-lite", Mesh(expert=4, model=2)),
    ("v6e:2x4", "gpt-oss-20b", Mesh(model=8)),
    ("v5e:2x4", "gpt-oss-20b", Mesh(expert=4, model=2)),
    ("v5e:2x4", "mixtral-8x7b", Mesh(expert=4, model=2)),
], ids=str)  # fmt: skip
def test_the_report_of_a_mixture_agrees_with_the_planner(target, name, mesh):
    """Of two layers: one without experts before one with them, or one with a window."""
    programs.check_report(target, "pallas_tpu", name, mesh, num_layers=2)


@pytest.mark.parametrize("target, name, mesh, more", [
    ("v5e:2x2", "llama3-8b", Mesh(context=2), {}),
    ("v5e:2x2", "llama3-8b", Mesh(context=2, model=2), {"max_seqs": 1}),
    ("v6e:2x2", "llama3-8b", Mesh(context=2), {"max_seqs": 1}),
    ("v6e:2x2", "llama3-8b", Mesh(context=2, model=2), {}),
    ("v5e:2x2", "deepseek-v2-lite", Mesh(context=2, model=2), {"cache": "int8"}),
], ids=str)  # fmt: skip
def test_the_report_of_divided_tokens_agrees_with_the_planner(target, name, mesh, more):
    """A lone row is gathered as others are, and pages of any format stay in place."""
    programs.check_report(target, "pallas_tpu", name, mesh, **more)


@pytest.mark.parametrize("mesh", [Mesh(context=4, model=4), Mesh(context=8, model=2)], ids=str)
def test_a_million_tokens_are_divided_over_sixteen_chips(mesh):
    programs.check_long_context("v5e:4x4", "llama3-8b", mesh, 1_000_000)


@pytest.mark.parametrize(
    "name, target", [("v5e_8_llama8b", "v5e:2x4"), ("v5p_64_llama70b", "v5p:2x4x4")]
)
def test_a_run_on_many_chips_is_as_planned(name, target):
    programs.check_run(name, target)


def test_a_table_of_uneven_rows_is_not_copied():
    """SmolLM2's, 576 wide, which a TPU lays out by columns: its rows are looked up by a product."""
    model = dataclasses.replace(presets.get("smollm2-135m").config, num_layers=1)
    engine = EngineConfig.of(max_seqs=16, max_context=1024, cache_bytes=64 * programs.MEGABYTE)
    absent = AbsentEngine(Config(model, engine).for_platform("tpu"), targets.parse("v6e:1x1"))
    for shape in absent.usual_shapes():
        executable = absent.compiled(shape)
        table = jax.ShapeDtypeStruct((model.vocab_size, model.width), "bfloat16")
        assert not programs.copies(executable, table)
        assert executable.memory_analysis().temp_size_in_bytes < 16 * programs.MEGABYTE


@pytest.mark.parametrize("proposer, tree", [
    ("ngram", {}), ("eagle", {}), ("dflash", {}), ("medusa", {"draft_tree": (0, 0, 1)}),
    ("eagle", {"tree_levels": 2, "tree_branches": 2}),
])  # fmt: skip
def test_a_step_that_drafts(proposer, tree):
    programs.check_drafting("v6e:1x1", proposer, tree)


@pytest.mark.parametrize("matrix", low_bit.MATRICES)
@pytest.mark.parametrize("format", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
def test_a_product_of_few_bits_reads_each_byte_once(topology, format, matrix):
    low_bit.check_product(programs.device(topology), format, 16, low_bit.MATRICES[matrix])


@pytest.mark.parametrize("format, rows", [
    ("int8", 1), ("w8a8", 16), ("w8a8_fp8", 16), ("int4", 1), ("int4", 128), ("int4_asym", 64),
    ("int4_g64", 16), ("int4_asym_g32", 32), ("int3", 16), ("int3_asym_g32", 16), ("mxfp4", 64),
    ("nvfp4", 16), ("fp8_block", 1), ("fp8_block", 128), ("mxfp8", 64),
])  # fmt: skip
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
def test_other_formats_and_rows(topology, format, rows):
    low_bit.check_product(programs.device(topology), format, rows, low_bit.MATRICES["down"])


@pytest.mark.parametrize("format", ["int4", "fp8_block"])
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
def test_experts_of_few_bits(topology, format):
    low_bit.check_experts(programs.device(topology), format, 32)


@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
@pytest.mark.parametrize("format, most", [
    ("int8", 0.1), ("w8a8", 0.1), ("int4", 1.1), ("int4_asym", 1.1), ("mxfp4", 1.1),
    ("fp8_block", 1.1),
])  # fmt: skip
def test_prefill_expands_a_matrix_once(topology, format, most):
    low_bit.check_prefill(programs.device(topology), format, most)


def test_a_product_that_expands_its_weights_is_found_out(monkeypatch):
    monkeypatch.setattr(Tpu, "skinny_product", lambda *_: None)
    with pytest.raises(AssertionError, match="int4 is expanded"):
        low_bit.check_product(programs.device("v5e:2x2"), "int4", 24, low_bit.MATRICES["qkv"])


@pytest.mark.parametrize("target", ["v5e:1x1", "v6e:1x1"])
def test_a_step_of_few_bits(target):
    low_bit.check_step(target)


@pytest.mark.parametrize("num_drafts, mixer", [
    (0, None), (2, None), (0, recurrence.DELTA_NET),
], ids=["mamba2", "drafts", "delta net"])  # fmt: skip
def test_a_step_updates_recurrent_states_in_place(num_drafts, mixer):
    recurrence.check_step("v6e:1x1", num_drafts, mixer)


def test_recurrent_states_that_are_gathered_are_found_out():
    recurrence.check_it_is_found_out("v6e:1x1")


@pytest.mark.parametrize("topology", _TOPOLOGIES)
@pytest.mark.parametrize("case", recurrence.CASES)
def test_the_update_of_recurrent_states_fits_and_is_in_place(case, topology):
    recurrence.check_kernel(programs.device(topology), recurrence.CASES[case])
