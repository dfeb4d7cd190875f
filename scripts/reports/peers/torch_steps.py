"""Steps of Llama 3 8B by PyTorch, as `scripts.bench` times them.

    python -m scripts.reports.peers.torch_steps --decode=1x1024,16x1024,64x1024 --prefill=1x512

Random weights in bfloat16, static shapes. A layer is one compiled graph (`torch.compile`, tuned by
coordinate descent), a step one CUDA graph, attention whichever of PyTorch's kernels is fastest for
the shape. A decode step is repeated at one position; a prefill step computes whole prompts. Prints
one JSON object after each point; the last is whole. Without a GPU nothing is compiled: that only
shows that the script runs.
"""

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch._inductor.config as inductor
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

_STEPS, _REPEATS = {"decode": 16, "prefill": 4}, 3  # launched back to back
_HEAD_WIDTH, _GROUP = 128, 4  # H, and query heads of a KV head
_EPSILON, _ROPE_BASE = 1e-5, 500_000.0

# Shapes: B rows, S new tokens, T tokens in the cache, D width, N heads, K KV heads, H head width.


class Layer(NamedTuple):
    """Weights of a layer: products that read the same input are one."""

    norm_D: torch.Tensor
    feed_norm_D: torch.Tensor
    qkv: torch.Tensor  # [(N + 2 K) H, D]
    out: torch.Tensor  # [D, N H]
    gate_up: torch.Tensor  # [2 F, D]
    down: torch.Tensor  # [D, F]


class Model(NamedTuple):
    """All weights."""

    embedding_VD: torch.Tensor
    layers: list[Layer]
    norm_D: torch.Tensor
    head_VD: torch.Tensor


def layer_step(
    x_BSD: torch.Tensor,
    layer: Layer,
    keys_BKTH: torch.Tensor,
    values_BKTH: torch.Tensor,
    position_S: torch.Tensor,
    angles_SH: torch.Tensor,
) -> torch.Tensor:
    """Returns a layer's output, and writes its keys and values at the cache's newest positions."""
    B, S, D = x_BSD.shape
    K, H = keys_BKTH.shape[1], keys_BKTH.shape[3]
    normed_BSD = F.rms_norm(x_BSD, (D,), layer.norm_D, _EPSILON)
    rows = F.linear(normed_BSD, layer.qkv).view(B, S, -1, H).transpose(1, 2)
    q_BNSH, k_BKSH, v_BKSH = rows.split((rows.shape[1] - 2 * K, K, K), dim=1)
    q_BNSH, k_BKSH = _rotated(q_BNSH, angles_SH), _rotated(k_BKSH, angles_SH)
    keys_BKTH[:, :, position_S] = k_BKSH
    values_BKTH[:, :, position_S] = v_BKSH
    out_BNSH = _attention(q_BNSH, keys_BKTH, values_BKTH)
    x_BSD = x_BSD + F.linear(out_BNSH.transpose(1, 2).reshape(B, S, -1), layer.out)
    normed_BSD = F.rms_norm(x_BSD, (D,), layer.feed_norm_D, _EPSILON)
    gate, up = F.linear(normed_BSD, layer.gate_up).chunk(2, dim=-1)
    return x_BSD + F.linear(F.silu(gate) * up, layer.down)


def _attention(q_BNSH: torch.Tensor, *keys_values_BKTH: torch.Tensor) -> torch.Tensor:
    """Causal where there is more than one query: such prompts fill the whole cache."""
    return F.scaled_dot_product_attention(
        q_BNSH, *keys_values_BKTH, is_causal=q_BNSH.shape[2] > 1, enable_gqa=True
    )


def _rotated(x: torch.Tensor, angles_SH: torch.Tensor) -> torch.Tensor:
    even, odd = x.float().chunk(2, dim=-1)
    turned = torch.cat((-odd, even), dim=-1)
    return (x.float() * angles_SH.cos() + turned * angles_SH.sin()).to(x.dtype)


def next_tokens(x_BD: torch.Tensor, norm_D: torch.Tensor, head_VD: torch.Tensor) -> torch.Tensor:
    """Returns the most likely token of each row."""
    return F.linear(F.rms_norm(x_BD, norm_D.shape, norm_D, _EPSILON), head_VD).argmax(-1)


class Step:
    """A step at one shape, ready to run."""

    def __init__(self, model: Model, rows: int, new: int, cached: int) -> None:
        device, is_gpu = model.norm_D.device, model.norm_D.is_cuda
        V, D = model.embedding_VD.shape
        shape = rows, D // _HEAD_WIDTH // _GROUP, cached, _HEAD_WIDTH
        cache = [[model.norm_D.new_empty(shape).normal_() for _ in "kv"] for _ in model.layers]
        tokens_BS = (torch.arange(rows * new, device=device) * 7919 % V).view(rows, new)
        position_S = torch.arange(cached - new, cached, device=device)
        exponents = torch.arange(_HEAD_WIDTH // 2, device=device).repeat(2) / (_HEAD_WIDTH // 2)
        angles_SH = position_S[:, None] * _ROPE_BASE**-exponents
        self.backend = _fastest(cache[0][0], new)
        compiled = (layer_step, next_tokens)
        if is_gpu:
            compiled = tuple(torch.compile(f, fullgraph=True, dynamic=False) for f in compiled)

        def run() -> torch.Tensor:
            x_BSD = F.embedding(tokens_BS, model.embedding_VD)
            for layer, (keys, values) in zip(model.layers, cache, strict=True):
                x_BSD = compiled[0](x_BSD, layer, keys, values, position_S, angles_SH)
            return compiled[1](x_BSD[:, -1], model.norm_D, model.head_VD)

        self._step = run  # a graph reads its arrays
        with sdpa_kernel(self.backend):
            self._run = _recorded(run) if is_gpu else run

    def seconds(self, steps: int) -> float:
        """Returns the mean of steps launched back to back, the median over repeats."""
        return statistics.median(_seconds(self._run, steps) for _ in range(_REPEATS))


def _fastest(keys_BKTH: torch.Tensor, new: int) -> SDPBackend:
    """The backend whose attention is fastest for the shape, of those that can compute it."""
    if not keys_BKTH.is_cuda:
        return SDPBackend.MATH
    B, K, _, H = keys_BKTH.shape
    q_BNSH = keys_BKTH.new_zeros(B, _GROUP * K, new, H)
    seconds = {}
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend), contextlib.suppress(RuntimeError):
            attend = _recorded(lambda: _attention(q_BNSH, keys_BKTH, keys_BKTH))
            seconds[backend] = _seconds(attend, 50)
    return min(seconds, key=lambda backend: seconds[backend], default=SDPBackend.MATH)


def _recorded(run: Callable[[], torch.Tensor]) -> Callable[[], object]:
    """Its launches as a CUDA graph; compiled first, on a stream of their own."""
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _seconds(run: Callable[[], object], steps: int) -> float:
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for count in (1, steps):  # the first warms up
        start = time.perf_counter()
        for _ in range(count):
            run()
        wait()
    return (time.perf_counter() - start) / steps


def drawn(sizes: argparse.Namespace, device: str) -> Model:
    """Draws random weights that keep the size of what they multiply."""
    D, hidden, V = sizes.width, sizes.hidden, sizes.vocab_size

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device) * shape[1] ** -0.5

    norm = torch.ones(D, dtype=torch.bfloat16, device=device)
    shapes = (D + 2 * D // _GROUP, D), (D, D), (2 * hidden, D), (D, hidden)
    layers = [Layer(norm, norm, *(matrix(*s) for s in shapes)) for _ in range(sizes.layers)]
    return Model(matrix(V, D), layers, norm, matrix(V, D))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--decode", default="1x1024", help="rows x context")
    parser.add_argument("--prefill", default="", help="prompts x tokens")
    for name, size in (("layers", 32), ("width", 4096), ("hidden", 14336), ("vocab_size", 128256)):
        parser.add_argument(f"--{name}", type=int, default=size)
    sizes = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inductor.coordinate_descent_tuning = True
    model = drawn(sizes, device)
    rows: dict[str, list[dict[str, float | str]]] = {"decode_steps": [], "prefill_steps": []}
    points = [("decode", "context", point) for point in sizes.decode.split(",")]
    points += [("prefill", "tokens", point) for point in filter(None, sizes.prefill.split(","))]
    with torch.no_grad():
        for kind, unit, point in points:
            count, tokens = map(int, point.split("x"))
            step = Step(model, count, 1 if kind == "decode" else tokens, tokens)
            row = {"rows": count, unit: tokens, "measured_s": step.seconds(_STEPS[kind])}
            rows[f"{kind}_steps"].append(row | {"attention": step.backend.name.lower()})
            print(json.dumps({"peer": f"torch {torch.__version__}"} | rows), flush=True)


if __name__ == "__main__":
    main()
