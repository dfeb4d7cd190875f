"""Programs compiled for an H200 by XLA's CUDA plug-in, without one."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest

from configs.mesh import Mesh
from inference.benchmark.kernels import baselines, timing
from inference.benchmark.kernels.attention_case import Arrays
from inference.planner.calibration import on_device
from inference.scheduling.step_shapes import StepShape
from layers.backends.gpu import Hopper
from layers.kernels import tuning
from layers.kernels.attention import append_gpu
from layers.kernels.norm import gpu as norm_of_sum
from layers.kernels.recurrence import convolution_gpu
from layers.linear import linear
from layers.ragged import Rectangle
from tests.aot import experts, low_bit, programs, recurrence

pytestmark = pytest.mark.aot

# Llama 3 70B's, of which no step is compiled here: a kernel is dumped once a process.
_DOWN_70B = 8192, 28672


@pytest.mark.parametrize("attention", ["reference", "pallas_gpu"])
@pytest.mark.parametrize("shape", [programs.DECODE, programs.MIXED], ids=["decode", "mixed"])
def test_the_step_keeps_its_cache_in_place(shape, attention):
    executable, cache, slots = programs.compiled_step(programs.device("h200"), shape, 64, attention)
    assert ("paged_attention" in executable.as_text()) == (attention == "pallas_gpu")
    memory = executable.memory_analysis()
    assert memory.alias_size_in_bytes == programs.num_bytes((cache, slots))
    assert memory.temp_size_in_bytes < 48 * programs.MEGABYTE
    assert not programs.copies(executable, cache[0].pages)


@pytest.mark.parametrize("mixer", [programs.SPARSE, programs.HEAVY], ids=["sparse", "heavy"])
def test_entries_of_several_tokens_stay_in_place(mixer):
    programs.check_entries(programs.device("h200"), mixer, 80)


def test_one_launch_goes_from_the_product_to_attention():
    """It norms and rotates heads, and writes keys and values to their pages."""
    device = programs.device("h200")
    executable, _, _ = programs.compiled_step(device, programs.DECODE, 64, "pallas_gpu", 2)
    (append,) = programs.launches(executable, "layer_1/.*/qkv/append")
    assert re.search(rf"%{append} = .*bf16\[[\d,]*\].* custom-call", executable.as_text())
    assert not programs.launches(executable, "layer_1/.*scatter")


def test_splits_of_a_lone_row_are_combined_in_their_launch():
    """Another lays queries out as tiles, with the zeros that count splits."""
    shape = StepShape((1, 1), (0, 64), greedy=True)
    executable, _, _ = programs.compiled_step(programs.device("h200"), shape, 64, "pallas_gpu", 2)
    found = programs.launches(executable, "layer_1/.*/attend/")
    print(found)
    assert len(found) == 2


def test_a_greedy_step_has_few_launches_and_no_branch():
    """How many a layer has says `test_cuda_launches.py`."""
    step = programs.counted(programs.device("h200"), programs.DECODE, 64, "pallas_gpu", 2)
    programs.check_the_host_never_waits(step)
    assert step.launches["sample"] <= 8  # no parameter is read


def test_a_step_that_draws_has_no_branch():
    step = programs.counted(programs.device("h200"), programs.SAMPLED, 64, "pallas_gpu", 1)
    print(step.launches)
    programs.check_the_host_never_waits(step)


_CHOOSING = {  # mixer, page tokens, launches of attention a layer, elements that 16 queries read
    "deepseek-v3.2": (programs.INDEXED, 64, 10, 16 * 2048 * 576),
    "quest": (programs.QUEST, 64, 14, 16 * 1024 * 2048),
    "deepseek-v4, chosen entries": (programs.SPARSE, 128, 9, 16 * 640 * 512),
    "deepseek-v4, all entries": (programs.HEAVY, 128, 3, 16 * 160 * 512),
}


@pytest.mark.parametrize("name", _CHOOSING)
def test_a_step_whose_queries_choose(name, ptxas):
    """No loop over blocks of keys, which the host would wait for, and no context in memory."""
    mixer, page_tokens, most, context = _CHOOSING[name]
    case = programs.device("h200"), programs.DECODE, page_tokens, "pallas_gpu"
    one, two = (programs.counted(*case, layers, mixer) for layers in (1, 2))
    added = programs.launches_a_layer(one, two)
    print(added)
    programs.check_the_host_never_waits(two)
    assert added["attend"] <= most
    programs.check_no_context_is_gathered(*case, mixer, context)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", ptxas())
    assert set(spills) == {("0", "0")}


_LLAMA = programs.Attention(32, 1, (32, 8), 128, 64)
_GPT_OSS = programs.Attention(1, 1, (64, 8), 64, 64, 128, has_sinks=True)
_CASES = {  # and registers a thread, and tuned sizes
    "llama3-8b": (_LLAMA, 160),
    "llama3-8b, two stages": (_LLAMA, 160, {"num_splits": 4, "num_stages": 2}),
    "llama3-8b, alone": (_LLAMA._replace(rows=1), 160),
    "llama3-8b, large pages": (_LLAMA._replace(page_tokens=128), 216),
    "llama3-8b, drafts": (_LLAMA._replace(width=5, dtype="float16"), 160),
    "llama3-8b, trees and sinks": (
        _LLAMA._replace(width=16, window=128, has_trees=True, has_sinks=True), 176,
    ),
    "llama3-8b, a short prompt": (_LLAMA._replace(rows=1, width=64), 160),
    "llama3-8b, first tokens": (_LLAMA._replace(window=1024, first_tokens=4), 160),
    "gpt-oss-20b, alone": (_GPT_OSS, 160),
    "llama2-13b": (_LLAMA._replace(rows=16, heads=(40, 40)), 160),
    "smollm2-135m, window": (programs.Attention(8, 1, (9, 3), 64, 128, 512), 184),
    "gemma2": (programs.Attention(8, 1, (8, 4), 256, 64, 4096, 50.0), 255),
    "llama3-8b, fp8": (_LLAMA._replace(cache="fp8"), 128),
    "llama2-13b, int8": (_LLAMA._replace(rows=64, heads=(40, 40), cache="int8"), 128),
    "llama3-8b, int8, large pages": (_LLAMA._replace(page_tokens=128, cache="int8"), 144),
    "llama3-8b, fp8, trees and sinks": (
        _LLAMA._replace(width=16, window=128, has_trees=True, has_sinks=True, cache="fp8"), 232,
    ),
    "smollm2-135m, int8, window": (
        programs.Attention(8, 1, (9, 3), 64, 128, 512, cache="int8"), 128,
    ),
    "gemma2, fp8": (programs.Attention(8, 9, (8, 4), 256, 64, 4096, 50.0, cache="fp8"), 255),
    "llama3-8b, int8, prefill": (_LLAMA._replace(rows=4, width=64, cache="int8"), 232),
    # Of prompts: three warpgroups of at most 168 begin in 64 Ki, the two that read get 240 then.
    "llama3-8b, prefill": (_LLAMA._replace(rows=4, width=64), 168),
    "llama3-8b, prefill, large pages": (_LLAMA._replace(rows=1, width=512, page_tokens=128), 168),
    "llama3-8b, prefill, first tokens": (
        _LLAMA._replace(rows=4, width=64, window=1024, first_tokens=4), 168,
    ),
    "gpt-oss-20b, prefill": (_GPT_OSS._replace(rows=4, width=64), 168),
    "llama3-8b, wide trees": (_LLAMA._replace(width=32, window=128, has_trees=True), 168),
    "smollm2-135m, prefill, window": (programs.Attention(8, 64, (9, 3), 64, 128, 512), 168),
    "gemma2, prefill": (programs.Attention(16, 64, (8, 4), 256, 64, 4096, 50.0), 168),
}  # fmt: skip


@pytest.fixture
def ptxas(tmp_path, monkeypatch):
    """What ptxas says of the kernels that were compiled since."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))

    def report() -> str:
        paths = sorted(tmp_path.glob("*.ptxas"))
        assert paths
        return "\n".join(path.read_text() for path in paths)

    return report


def _check_kernel(executable, pages, report, max_registers, max_temporaries):
    """Pages in place, no spills, bounded registers a thread and temporaries."""
    memory = executable.memory_analysis()
    assert memory.alias_size_in_bytes == programs.num_bytes(pages)
    assert not programs.copies(executable, pages)
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report
    assert "serialized" not in report  # what ptxas does to products it cannot overlap
    registers = int(re.search(r"Used (\d+) registers", report)[1])
    print(f"{registers} registers, {memory.temp_size_in_bytes} bytes of temporaries")
    assert registers <= max_registers
    assert memory.temp_size_in_bytes < max_temporaries


@pytest.mark.parametrize("case", _CASES)
def test_the_kernel_fits_its_registers_and_keeps_the_cache_in_place(case, ptxas, monkeypatch):
    shape, max_registers, *tuned = _CASES[case]
    if tuned:
        monkeypatch.setattr(tuning, "sizes", lambda *names: tuned[0])
    executable, pages = programs.compiled_attention(programs.device("h200"), "pallas_gpu", shape)
    _check_kernel(executable, pages, ptxas(), max_registers, 16 * programs.MEGABYTE)


_DEEPSEEK = programs.Latents(32, 1, 128, 512, 64, 64)
_LATENTS = {  # and registers a thread, where they are not 168
    "deepseek-v3": (_DEEPSEEK,),
    "deepseek-v3, alone": (_DEEPSEEK._replace(rows=1),),
    "deepseek-v3, one chip of eight": (_DEEPSEEK._replace(num_heads=16),),
    "deepseek-v3, drafts": (_DEEPSEEK._replace(num_heads=16, width=3),),
    "deepseek-v3, trees": (_DEEPSEEK._replace(num_heads=16, width=16, has_trees=True),),
    "deepseek-v3, prefill": (_DEEPSEEK._replace(rows=2, width=64),),
    "deepseek-v3, fp8": (_DEEPSEEK._replace(cache="fp8"), 240),
    "deepseek-v3, one chip of eight, int8": (
        _DEEPSEEK._replace(num_heads=16, width=3, cache="int8"),
        240,
    ),
    "deepseek-v3, trees, fp8": (
        _DEEPSEEK._replace(num_heads=16, width=16, has_trees=True, cache="fp8"),
        248,
    ),
    "narrow latents": (_DEEPSEEK._replace(num_heads=16, rank=128, dtype="float16"),),
    "large pages": (_DEEPSEEK._replace(num_heads=16, page_tokens=128),),
}


@pytest.mark.parametrize("case", _LATENTS)
def test_the_kernel_for_latents_fits_its_registers_and_keeps_the_cache_in_place(case, ptxas):
    """Three warpgroups of 168 registers a thread at most begin in 64 Ki; the two that read get 232
    each then.
    """
    shape, *max_registers = _LATENTS[case]
    executable, pages = programs.compiled_latents(programs.device("h200"), "pallas_gpu", shape)
    report = ptxas()
    print(report)
    _check_kernel(executable, pages, report, *(max_registers or [168]), 64 * programs.MEGABYTE)


@pytest.mark.parametrize("name", ["reference", "pallas_gpu"])
def test_what_is_timed_runs_in_a_loop_without_a_copy(name):
    """A trip count that is known, so that no iteration waits for the host; in each the work, and
    all of the output written.
    """

    def tensor(*shape: int, dtype="bfloat16") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    (kernel,) = (each for each in baselines.kernels() if each.name == name)
    kv, out = tensor(8, 1024, 8, 128), tensor(8, 1, 32, 128)
    arrays = Arrays(
        tensor(8, 1, 32, 128), kv, kv, tensor(8, 16, dtype="int32"), tensor(8, dtype="int32")
    )
    pages = tensor(129, 64, 2048, dtype="uint16")
    loop, carry = (on_device.looped(timing.chained(kernel.attend), 50), (arrays.q_YWNH, out, pages))
    executable = programs.compiled(loop, programs.device("h200"), (carry, arrays), (0,))
    assert not programs.copies(executable, pages)
    assert not programs.copies(executable, arrays.q_YWNH)
    body = programs.loop_body(executable, 50)
    work = {"pallas_gpu": r"mosaic_gpu.*/paged_attention/", "reference": r" while\("}
    assert any(re.search(work[name], instruction) for instruction in body.values())
    _, _, written, *_ = programs.operands(body["ROOT"])
    while re.search(r" (bitcast|get-tuple-element)\(", body[written]):
        (written,) = programs.operands(body[written])
    writer = {"pallas_gpu": " custom-call(", "reference": " fusion("}
    assert writer[name] in body[written]
    shape = re.search(r"= \(?bf16\[([\d,]+)\]", body[written])[1]
    assert math.prod(map(int, shape.split(","))) == 8 * 32 * 128


def test_rates_are_of_what_they_count():
    """Copies of a gigabyte and products, and nothing that moves as much beside them."""
    for step, shapes in (
        (on_device.changed, (jax.ShapeDtypeStruct((1 << 28,), jnp.uint32),)),
        (
            on_device.summed,
            (jax.ShapeDtypeStruct((1,), jnp.uint32), jax.ShapeDtypeStruct((1 << 28,), jnp.uint32)),
        ),
        (on_device.products, (jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16),) * 2),
    ):
        executable = programs.compiled(
            on_device.looped(step, 20), programs.device("h200"), shapes, (0,)
        )
        assert '"known_trip_count":{"n":"20"}' in executable.as_text()
        assert not programs.copies(executable, shapes[-1])


@pytest.mark.parametrize("target", ["h200", "2xh200"])
def test_the_report_agrees_with_the_planner(target):
    programs.check_report(target, "pallas_gpu")


@pytest.mark.parametrize("target, name, mesh, cache", [
    ("2xh200", "llama3-8b", Mesh(context=2), None),
    ("4xh200", "llama3-8b", Mesh(context=2, model=2), None),
    ("4xh200", "deepseek-v2-lite", Mesh(context=2, model=2), "fp8"),
], ids=str)  # fmt: skip
def test_the_report_of_divided_tokens_agrees_with_the_planner(target, name, mesh, cache):
    programs.check_report(target, "pallas_gpu", name, mesh, cache=cache)


@pytest.mark.parametrize("name, cache", [
    ("llama3-8b", "fp8"), ("llama2-13b", "int8"), ("deepseek-v2-lite", "fp8"),
])  # fmt: skip
def test_the_report_of_a_quantized_cache_agrees_with_the_planner(name, cache):
    """As the kernel lays rows out: bytes that the planner counts are those of the engine."""
    programs.check_report("h200", "pallas_gpu", name, cache=cache)


def test_layers_of_experts_in_few_bits_take_turns_in_their_memory():
    """XLA fills equal arrays of zeros for all layers at once, where nothing keeps it from that: of
    the third layer's alone there were 170 MB.
    """
    programs.check_report("h100", "pallas_gpu", "gpt-oss-120b", num_layers=3, weights="mxfp4")


@pytest.mark.parametrize("target, name, mesh", [
    ("h200", "deepseek-v2-lite", Mesh()), ("2xh200", "deepseek-v2-lite", Mesh(expert=2)),
    ("h200", "gpt-oss-20b", Mesh()), ("2xh200", "gpt-oss-20b", Mesh(expert=2)),
], ids=str)  # fmt: skip
def test_the_report_of_a_mixture_agrees_with_the_planner(target, name, mesh):
    """Of two layers: one without experts before one with them, or one with a window."""
    programs.check_report(target, "pallas_gpu", name, mesh, num_layers=2)


def test_a_run_on_many_chips_is_as_planned():
    programs.check_run("h100x8_llama70b", "8xh200")


@pytest.mark.parametrize("proposer, tree", [
    ("ngram", {}), ("eagle", {}), ("dflash", {}), ("medusa", {"draft_tree": (0, 0, 1)}),
    ("eagle", {"tree_levels": 2, "tree_branches": 2}),
])  # fmt: skip
def test_a_step_that_drafts(proposer, tree):
    """Its products read weights early: those of two layers and the head, and those that draft."""
    step = programs.check_drafting("h200", proposer, tree)
    assert low_bit.check_weights_are_arguments(step) >= 9


@pytest.mark.parametrize("matrix", low_bit.MATRICES)
@pytest.mark.parametrize("format", ["int8", "fp8", "int4"])
def test_a_product_of_few_bits_reads_each_byte_once(format, matrix):
    low_bit.check_product(programs.device("h200"), format, 16, low_bit.MATRICES[matrix])


@pytest.mark.parametrize("format, rows", [
    ("bfloat16", 1), ("bfloat16", 64), ("int8", 1), ("int8", 64), ("w8a8", 16), ("w8a8_fp8", 16),
    ("fp8", 64), ("int4", 1), ("int4", 64), ("int4_asym", 64), ("int4_g64", 16),
    ("int4_asym_g64", 64), ("int4_asym_g32", 16), ("int4_asym_g32", 48), ("int3", 32),
    ("int3_asym_g64", 16), ("int3_asym_g32", 8), ("mxfp4", 48), ("nvfp4", 16), ("nvfp4", 48),
    ("fp8_block", 1), ("fp8_block", 64), ("mxfp8", 16), ("mxfp8", 48),
])  # fmt: skip
def test_other_formats_and_rows(format, rows, ptxas):
    """As many rows as the kernel has registers for, among them."""
    low_bit.check_product(programs.device("h200"), format, rows, _DOWN_70B)
    if low_bit.FORMATS[format].activations is None:
        report = ptxas()
        print(re.findall(r"Used (\d+) registers", report))
        spilled = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
        assert set(spilled) == {("0", "0")}


@pytest.mark.parametrize("format", ["int4", "fp8_block"])
def test_experts_of_few_bits(format):
    low_bit.check_experts(programs.device("h200"), format, 32)


@pytest.mark.parametrize("name, rows, most", [
    ("qwen3-30b-a3b", 1, 6), ("qwen3-30b-a3b", 8, 6), ("qwen3-30b-a3b", 16, 6),
    ("gpt-oss-20b", 64, 9),
])  # fmt: skip
def test_a_mixture_of_few_tokens_has_few_launches_and_reads_experts_once(name, rows, most, ptxas):
    experts.check_mixture("h200", name, rows, most)
    spilled = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", ptxas())
    assert set(spilled) == {("0", "0")}


@pytest.mark.parametrize("format, most", [
    ("int8", 0.01), ("w8a8", 0.01), ("int4", 1.1), ("int3_asym_g32", 1.1), ("mxfp4", 1.6),
    ("fp8_block", 1.1),
])  # fmt: skip
def test_prefill_expands_a_matrix_once(format, most):
    low_bit.check_prefill(programs.device("h200"), format, most)


def test_a_product_that_expands_its_weights_is_found_out(monkeypatch):
    monkeypatch.setattr(Hopper, "skinny_product", lambda *_: None)
    with pytest.raises(AssertionError, match="int4 is expanded"):
        low_bit.check_product(programs.device("h200"), "int4", 24, low_bit.MATRICES["qkv"])


@pytest.mark.parametrize("format", ["int4", "int8", "fp8_block"])
def test_a_step_of_few_bits(format):
    low_bit.check_step("h200", format)


def test_a_weight_that_a_launch_writes_is_found_out():
    matrix, rows = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, 256), (8, 256)))
    step = programs.compiled(
        lambda x_TD, w_FD: linear(x_TD, w_FD + w_FD), programs.device("h200"), (rows, matrix), ()
    )
    with pytest.raises(AssertionError):
        low_bit.check_weights_are_arguments(step)


@pytest.mark.parametrize("num_drafts, mixer", [
    (0, None), (2, None), (0, recurrence.DELTA_NET),
], ids=["mamba2", "drafts", "delta net"])  # fmt: skip
def test_a_step_updates_recurrent_states_in_place(num_drafts, mixer):
    recurrence.check_step("h200", num_drafts, mixer)


def test_recurrent_states_that_are_gathered_are_found_out():
    recurrence.check_it_is_found_out("h200")


def _tensor(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _norm(rows, width, has_bias=False):
    weight_D = _tensor(width, dtype="bfloat16")
    of_sum = functools.partial(norm_of_sum.of_sum, eps=1e-5, offset=0.0, dtype="bfloat16")
    stream_TD = _tensor(rows, width)
    return of_sum, (stream_TD, stream_TD, weight_D, weight_D if has_bias else None), ()


def _convolution(rows, widths, num_drafts):
    X, width = sum(widths), 1 + num_drafts
    convolve = functools.partial(convolution_gpu.convolve, widths=widths, has_silu=True)
    rectangle = Rectangle(
        _tensor(rows, dtype="int32"), _tensor(rows, width, dtype="int32"),
        _tensor(rows, width, dtype="bool"), (),
    )  # fmt: skip
    half = functools.partial(_tensor, dtype="bfloat16")
    tails = _tensor(rows + 1, width, 3, X)
    return convolve, (_tensor(rows, width, X), half(X, 4), half(X), tails, rectangle), (3,)


def _append(tokens, heads, width, has_norms):
    (N, K), half = heads, functools.partial(_tensor, dtype="bfloat16")
    append = functools.partial(append_gpu.append, shape=(*heads, width), dtype="bfloat16", scale=1)
    norms = (half(width), half(width)) if has_norms else None
    return append, (
        _tensor(tokens, (N + 2 * K) * width), (_tensor(tokens, width // 2),) * 2, norms,
        (_tensor(tokens, dtype="int32"),) * 2, _tensor(99, 64, 2 * K * width, dtype="uint16"),
    ), (4,)  # fmt: skip


_ROW_KERNELS = {  # and registers a thread; rows of no other test, as a kernel is dumped once
    "norm, llama3-8b": (_norm(24, 4096), 80),
    "norm, gpt-oss": (_norm(24, 2880), 64),
    "norm, with a bias": (_norm(24, 8192, True), 176),
    "norm, the widest": (_norm(24, 16384), 255),
    "convolution, mamba2-2.7b": (_convolution(24, (5120, 128, 128), 0), 32),
    "convolution, drafts": (_convolution(24, (4096, 2048, 2048), 3), 48),
    "append, llama3-8b": (_append(24, (32, 8), 128, False), 48),
    "append, gpt-oss": (_append(24, (64, 8), 64, False), 64),
    "append, qwen3-30b-a3b": (_append(24, (32, 4), 128, True), 64),
    "append, qwen3-next": (_append(24, (16, 2), 256, True), 96),
}


@pytest.mark.parametrize("case", _ROW_KERNELS)
def test_kernels_of_rows_spill_nothing_and_write_in_place(case, ptxas):
    (kernel, arguments, donated), max_registers = _ROW_KERNELS[case]
    executable = programs.compiled(kernel, programs.device("h200"), arguments, donated)
    report = ptxas()
    registers = int(re.search(r"Used (\d+) registers", report)[1])
    print(f"{registers} registers")
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report
    assert registers <= max_registers
    for argument in donated:
        assert not programs.copies(executable, arguments[argument])
    owned = programs.num_bytes([arguments[argument] for argument in donated])
    assert executable.memory_analysis().alias_size_in_bytes >= owned


@pytest.mark.parametrize("case", recurrence.CASES)
def test_the_update_of_recurrent_states_is_in_place_and_spills_nothing(case, ptxas):
    recurrence.check_kernel(programs.device("h200"), recurrence.CASES[case])
    report = ptxas()
    print(re.findall(r"Used (\d+) registers", report))
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report
