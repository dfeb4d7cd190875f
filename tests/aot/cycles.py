"""Cycles that attention takes a block of cached tokens on TPUs, by the compiler's own schedule of
the kernel. Nothing is measured: no copy is waited for, no memory is slow.

    python -m tests.aot.cycles                      a line for each kernel, case and chip
    python -m tests.aot.cycles KERNEL CASE CHIP     that one as JSON, with slots by unit

Kernels are `kernelbench`'s; tpu-inference's is counted where it can be imported.
"""

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
from typing import Any, NamedTuple
from unittest import mock

import jax

from configs.hardware import catalog
from inference.benchmark.kernels import attention_case, baselines
from inference.benchmark.kernels.attention_case import Arrays, Case
from inference.benchmark.kernels.baselines import Kernel
from inference.planner.compiled import bundles
from layers.kernels.device import Device
from tests.aot import programs

OURS, THEIRS = "pallas_tpu", "tpu-inference"
CHIPS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2"}
CASES = {  # of Llama 3 8B
    "decode": Case(32, 1, 4096, page_tokens=128),
    "prefill": Case(4, 256, 4096, page_tokens=128),
}
TOKENS = 512  # cached ones that cycles are counted of,
QUERIES = {"decode": 1, "prefill": 128}  # and tokens with queries
# Data sheets' peaks over the FLOPs of a cycle: v5e has four units of 128 x 128, and XLA's estimates
# of copies agree with v6e's.
_HZ = {"v5e": 197e12 / (8 * 128**2), "v6e": 918e12 / (8 * 256**2)}


class _Block(NamedTuple):
    """What an iteration computes: the kernel's name begins with its sizes, if it has them."""

    kernel: str
    queries: int
    tokens: int
    products: int = 0  # inner loops with products, of which an iteration runs so many


_BLOCKS = {
    (OURS, "decode"): _Block("paged_attention", 1, 1024),
    (OURS, "prefill"): _Block("paged_attention", 128, 512),
    (THEIRS, "decode"): _Block("RPAd-p_128-bq_1_1-bkv_4096_4096", 1, 4096, 1),
    (THEIRS, "prefill"): _Block("RPAm-p_128-bq_256_128-bkv_1024_512", 256, 1024, 2),
}


def limit(kernel: str) -> str | None:
    """Why a kernel cannot be counted here."""
    return _kernel(kernel).limit(CASES["decode"], Device("tpu", "TPU v6e", 1))


def count(kernel: str, case: str, chip: str) -> dict[str, Any]:
    """Compiles in another process, since libtpu reads its flags once: cycles, those that the copy
    of the tokens takes, and slots by unit.
    """
    with tempfile.TemporaryDirectory() as directory:
        written = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {bundles.flags(directory)}"
        command = [sys.executable, "-m", "tests.aot.cycles", "--compile", kernel, case, chip]
        subprocess.run(
            command, env=os.environ | {"LIBTPU_INIT_ARGS": written}, check=True, timeout=300
        )
        sizes = _BLOCKS[kernel, case]
        whole = bundles.read(directory, sizes.kernel)
    page_format, page_tokens = CASES[case].page_format, CASES[case].page_tokens
    page_bytes = page_tokens * page_format.bytes_per_token
    (loop,) = (loop for loop in whole.walk() if loop.multiplies)
    if sizes.products:
        loop = next(outer for outer in whole.walk() if loop in outer.loops)
    block = loop.block(page_bytes, sizes.tokens // page_tokens, sizes.products)
    per = TOKENS / sizes.tokens * QUERIES[case] / sizes.queries
    copy_s = TOKENS * page_format.bytes_per_token / catalog.get(chip).read_bandwidth
    return {
        "cycles": round(block.cycles * per),
        "copy_cycles": round(copy_s * _HZ[chip]),
        "slots": {unit: round(number * per) for unit, number in block.slots.items() if number},
    }


def _kernel(name: str) -> Kernel:
    return next(kernel for kernel in baselines.kernels() if kernel.name == name)


def _compile(kernel_name: str, case_name: str, chip: str) -> None:
    kernel, case, device = _kernel(kernel_name), CASES[case_name], programs.device(CHIPS[chip])
    arrays = jax.eval_shape(functools.partial(attention_case.draw, case, 0))
    stored = jax.eval_shape(functools.partial(kernel.store, case), arrays)

    def attend(q_YWNH: jax.Array, arrays: Arrays, stored: Any) -> Any:
        return kernel.attend(q_YWNH, arrays, stored)

    with contextlib.ExitStack() as stack:
        if kernel_name == THEIRS:  # it asks for the default device, which is this machine
            version = mock.patch.object(
                baselines.ragged_library(), "get_tpu_version", lambda: int(chip[1])
            )
            stack.enter_context(version)
        programs.compiled(attend, device, (arrays.q_YWNH, arrays, stored), (2,))


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--compile"]:
        _compile(*arguments[1:])
    elif arguments:
        print(json.dumps(count(*arguments)))
    else:
        for chip in CHIPS:
            for case in CASES:
                for kernel in (OURS, THEIRS):
                    if (reason := limit(kernel)) is not None:
                        print(f"{kernel} {reason}")
                        continue
                    counted = count(kernel, case, chip)
                    print(
                        f"{chip} {case} {kernel}: {counted['cycles']} cycles a {QUERIES[case]} x "
                        f"{TOKENS} tokens; copying the {TOKENS} takes {counted['copy_cycles']}",
                        flush=True,
                    )


if __name__ == "__main__":
    main(sys.argv[1:])
