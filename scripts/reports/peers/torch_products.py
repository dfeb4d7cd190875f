"""Products of few rows by PyTorch's libraries, as `kernelbench --products` has ours.

    python -m scripts.reports.peers.torch_products --seconds=60

Llama 3 8B's matrices: bfloat16 by cuBLAS, fp8 by `torch._scaled_mm` (activations in fp8 too), int4
in groups of 128 by `torch._weight_int4pack_mm`, int8 by `torch._weight_int8pack_mm`. A run is one
CUDA graph of as many matrices as caches cannot hold. First come the rates of reading, of a copy and
of a large product. Each kernel is compared with the same product in float32, and gets no time where
it is wrong. Prints one JSON object after each case; the last is whole. Without a GPU the matrices
are small: that only shows that the script runs.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

_MATRICES = {
    "gate_up": (28672, 4096), "down": (4096, 14336), "qkv": (6144, 4096), "out": (4096, 4096),
    "head": (128256, 4096),
}  # fmt: skip
_BYTES = {"bfloat16": 2.0, "int4": 0.5 + 4 / 128, "fp8": 1.0, "int8": 1.0}  # an element
_ROWS, _REPEATS, _GROUP = (1, 16, 64), 3, 128
_CACHED_BYTES, _MOST_MATRICES = 200 << 20, 24
_MAX_ERROR = {"fp8": 0.1}  # of a product's norm: activations are rounded, too
_MAX_EXACT_ERROR = 2.0**-7

# A kernel's product, and the same in float32.
Products = tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]


def product(format: str, x_TD: torch.Tensor, w_FD: torch.Tensor) -> Products:
    """A product with weights that are quantized here."""
    if format == "bfloat16":
        return lambda: F.linear(x_TD, w_FD), lambda: F.linear(x_TD.float(), w_FD.float())
    if format == "fp8":
        x_scale, w_scale = (x.abs().amax(1, keepdim=True).float() / 448 for x in (x_TD, w_FD))
        x_fp8, w_fp8 = (
            (x / s).to(torch.float8_e4m3fn) for x, s in ((x_TD, x_scale), (w_FD, w_scale))
        )
        return (
            lambda: torch._scaled_mm(
                x_fp8, w_fp8.t(), scale_a=x_scale, scale_b=w_scale.t(), out_dtype=torch.bfloat16
            ),
            lambda: F.linear(x_TD.float(), w_fp8.float() * w_scale),
        )
    if format == "int8":
        scale_F = w_FD.abs().amax(1).float() / 127
        w_int8 = (w_FD / scale_F[:, None]).round().to(torch.int8)
        rounded = scale_F.to(x_TD.dtype)
        return (
            lambda: torch._weight_int8pack_mm(x_TD, w_int8, rounded),
            lambda: F.linear(x_TD.float(), w_int8.float() * rounded.float()[:, None]),
        )
    groups_FGX = w_FD.float().view(len(w_FD), -1, _GROUP)
    scale_FG1 = (groups_FGX.abs().amax(2, keepdim=True) / 7).to(torch.bfloat16)
    q_FD = (groups_FGX / scale_FG1.float()).round().clamp(-8, 7).view(w_FD.shape)
    unsigned_FD = (q_FD + 8).to(torch.uint8)
    pairs = unsigned_FD[:, ::2] << 4 | unsigned_FD[:, 1::2]
    packed = torch._convert_weight_to_int4pack(pairs.contiguous(), 8)
    scales = scale_FG1.squeeze(2).t()
    scales_and_zeros = torch.stack((scales, torch.zeros_like(scales)), 2).contiguous()
    return (
        lambda: torch._weight_int4pack_mm(x_TD, packed, _GROUP, scales_and_zeros),
        lambda: F.linear(
            x_TD.float(), (q_FD.view(groups_FGX.shape) * scale_FG1.float()).view(w_FD.shape)
        ),
    )


def measured(format: str, rows: int, shape: tuple[int, int], device: str) -> dict[str, object]:
    """The time of a kernel that is right; else what is wrong with it."""
    try:
        x_TD = torch.randn(rows, shape[1], dtype=torch.bfloat16, device=device)
        size = shape[0] * shape[1] * _BYTES[format]
        products: list[Callable[[], torch.Tensor]] = []
        for _ in range(
            min(_MOST_MATRICES, math.ceil(_CACHED_BYTES / size)) if device == "cuda" else 1
        ):
            w_FD = torch.randn(shape, dtype=torch.bfloat16, device=device) * shape[1] ** -0.5
            kernel, exact = product(format, x_TD, w_FD)
            if not products:
                expected = exact()
                error = ((kernel().float() - expected).norm() / expected.norm()).item()
                if not error <= _MAX_ERROR.get(format, _MAX_EXACT_ERROR):
                    return {"status": "wrong", "error": error if math.isfinite(error) else None}
            products.append(kernel)
            del w_FD, exact
        return {"status": "right", "error": error, "seconds": seconds(products, device)}
    except Exception as failure:  # a library's own, whatever it is
        reason = f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
        return {"status": "failed", "reason": reason}


def seconds(calls: Sequence[Callable[[], object]], device: str) -> float:
    """Seconds of one call, the median over repeats: on a GPU, of a graph of all of them."""

    def run_all() -> None:
        for call in calls:
            call()

    run: Callable[[], object] = run_all
    if device == "cuda":
        with torch.cuda.stream(torch.cuda.Stream()):
            run_all()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run_all()
        run = graph.replay
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    run()
    wait()
    start = time.perf_counter()
    run()
    wait()
    count = max(1, min(500, math.ceil(0.02 / (time.perf_counter() - start))))
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        for _ in range(count):
            run()
        wait()
        times.append((time.perf_counter() - start) / (count * len(calls)))
    return statistics.median(times)


def ceilings(device: str) -> dict[str, Any]:
    """Bytes a second of reading and of a copy, FLOPs a second of a product in bfloat16."""
    scale = 1 if device == "cuda" else 64
    x = torch.ones((1 << 28) // scale, dtype=torch.float32, device=device)
    y, width = torch.empty_like(x), 8192 // scale
    a = torch.randn(width, width, dtype=torch.bfloat16, device=device)
    num_bytes = x.numel() * 4
    return {
        "read_bandwidth": num_bytes / seconds([x.sum], device),
        "copy_bandwidth": 2 * num_bytes / seconds([lambda: y.copy_(x)], device),
        "rates": {width: 2 * width**3 / seconds([lambda: a @ a], device)},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0, help="begin no case after that")
    deadline = time.monotonic() + parser.parse_args().seconds
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rates = ceilings(device)
    result: dict[str, object] = {"peer": f"torch {torch.__version__}", **rates}
    cases: list[dict[str, object]] = []
    for rows in _ROWS if device == "cuda" else (1,):
        for format in _BYTES:
            for name, shape in _MATRICES.items() if device == "cuda" else (("out", (256, 256)),):
                if time.monotonic() > deadline:
                    continue
                F_, D = shape
                num_bytes = F_ * D * _BYTES[format] + rows * 2 * (D + F_)
                label = f"{name} {F_} x {D}, {format}, rows {rows}"
                row = measured(format, rows, shape, device)
                if isinstance(row_s := row.get("seconds"), float):
                    row["share"] = num_bytes / rates["read_bandwidth"] / row_s
                cases.append({"case": label, "matrix": name, "format": format, "rows": rows,
                              "bytes": num_bytes, "results": {"torch": row}})  # fmt: skip
                print(json.dumps(result | {"rows": cases}), flush=True)


if __name__ == "__main__":
    main()
