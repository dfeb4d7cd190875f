"""Programs compiled for an H200 by XLA's CUDA plug-in, without one."""

import re

import jax
import jax.numpy as jnp
import pytest

from configs.cache import keys_values
from layers import attention, kv_cache
from layers.mixer import StepContext
from layers.ragged import Ragged, Rectangle
from tests.aot import programs

pytestmark = pytest.mark.aot


@pytest.mark.parametrize("attention", ["reference", "pallas_gpu"])
@pytest.mark.parametrize("shape", [programs.DECODE, programs.MIXED], ids=["decode", "mixed"])
def test_the_step_keeps_its_cache_in_place(shape, attention):
    executable, cache, slots = programs.compiled_step(programs.h200(), shape, 64, attention)
    assert ("paged_attention" in executable.as_text()) == (attention == "pallas_gpu")
    memory = executable.memory_analysis()
    assert memory.alias_size_in_bytes == programs.num_bytes((cache, slots))
    assert memory.temp_size_in_bytes < 48 * programs.MEGABYTE
    assert not programs.copies(executable, cache[0])


def test_the_write_rotates_the_keys():
    """A layer's attention is four launches and the product after it: one makes rows of the pages
    from the product of queries, keys and values, one rotates the queries, one reads the pages, one
    combines its parts. What all layers share (the mask, which pages a split reads) is computed by
    the first.
    """
    device = programs.h200()
    executable, _, _ = programs.compiled_step(device, programs.DECODE, 64, "pallas_gpu", 2)
    found = programs.launches(executable, "layer_1/.*/(attend|out)/")
    print(found)
    assert len(found) == 5
    (write,) = [name for name in found if "scatter" in name]
    *_, product = programs.launches(executable, "layer_1/.*/qkv/")
    assert re.search(rf"%{write} = .*%{product}\b", executable.as_text())


# Rows, query tokens, (N, K), H, page tokens, window, cap, dtype, whether trees and sinks; registers
# a thread.
_CASES = {
    "llama3-8b": ((32, 1, (32, 8), 128, 64, None, None, "bfloat16", False), 160),
    "llama3-8b, alone": ((1, 1, (32, 8), 128, 64, None, None, "bfloat16", False), 160),
    "llama3-8b, large pages": ((32, 1, (32, 8), 128, 128, None, None, "bfloat16", False), 216),
    "llama3-8b, drafts": ((32, 5, (32, 8), 128, 64, None, None, "float16", False), 160),
    "llama3-8b, trees and sinks": ((32, 16, (32, 8), 128, 64, 128, None, "bfloat16", True), 176),
    "llama3-8b, prefill": ((4, 64, (32, 8), 128, 64, None, None, "bfloat16", False), 160),
    "llama2-13b": ((16, 1, (40, 40), 128, 64, None, None, "bfloat16", False), 160),
    "smollm2-135m, window": ((8, 1, (9, 3), 64, 128, 512, None, "bfloat16", False), 184),
    "gemma2": ((8, 1, (8, 4), 256, 64, 4096, 50.0, "bfloat16", False), 255),
}


@pytest.mark.parametrize("case", _CASES)
def test_the_kernel_fits_its_registers_and_keeps_the_cache_in_place(case, tmp_path, monkeypatch):
    shape, max_registers = _CASES[case]
    rows, width, (N, K), H, page_tokens, window, cap, dtype, has_trees = shape
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))

    def tensor(*shape: int, dtype="int32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    ancestors_CW = tensor(rows, width, dtype="uint32") if has_trees else None
    ragged = Ragged((Rectangle(
        tensor(rows), tensor(rows, width), tensor(rows, width, dtype="bool"),
        (tensor(rows, 4096 // page_tokens),), ancestors_CW,
    ),))  # fmt: skip
    pages = tensor(1025, page_tokens, 2 * K * H, dtype=kv_cache.stored_dtype(dtype))
    kv = tensor(rows * width, K, H, dtype=jnp.dtype(dtype))
    sinks_N = tensor(N, dtype="float32") if has_trees else None

    def attend(q, k, v, pages, ragged, sinks_N):
        spec = keys_values(K, H, window)
        context = StepContext(ragged, None, spec, 0, True, False, "pallas_gpu")
        return attention.attend(q, k, v, pages, context, cap, sinks_N)

    arguments = tensor(rows * width, N, H, dtype=kv.dtype), kv, kv, pages, ragged, sinks_N
    executable = programs.compiled(attend, programs.h200(), arguments, (3,))
    memory = executable.memory_analysis()
    assert memory.alias_size_in_bytes == programs.num_bytes(pages)
    assert memory.temp_size_in_bytes < 16 * programs.MEGABYTE
    assert not programs.copies(executable, pages)
    (report,) = (path.read_text() for path in tmp_path.glob("*.ptxas"))
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report
    assert "serialized" not in report  # what ptxas does to products it cannot overlap
    registers = int(re.search(r"Used (\d+) registers", report)[1])
    print(f"{case}: {registers} registers, {memory.temp_size_in_bytes} bytes of temporaries")
    assert registers <= max_registers
