"""What the target of a program offers: kernels, and what XLA's compiler for it is good at."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import jax
import numpy as np

from configs.kinds.experts import Experts
from layers.kernels.device import Device
from layers.kernels.linear.adapted import Adapted
from layers.kernels.linear.low_bit import Quantized, Word

Kernel = Callable[..., jax.Array]
SumNorm = Callable[..., tuple[jax.Array, jax.Array]]  # `kernels.norm.gpu.of_sum`
StateKernel = Callable[..., tuple[jax.Array, jax.Array]]  # outputs, and states in place
Append = Callable[..., tuple[jax.Array, jax.Array]]  # `kernels.cpu.rows.append`
Convolution = Callable[..., tuple[tuple[jax.Array, ...], jax.Array]]  # `rows.convolve`
_Out = TypeVar("_Out")
_State = TypeVar("_State")


class RowKernels(Protocol):
    """What a step computes of rows besides products and attention (`kernels/cpu/rows.py`)."""

    norm: Kernel
    gate: Kernel
    summarize: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
    choose: Callable[..., tuple[jax.Array, jax.Array]]
    zeros: Kernel


class RoutingResult(Protocol):
    """Where tokens go (`kernels/experts/routing_gpu.py`)."""

    @property
    def weights_EW(self) -> jax.Array: ...
    @property
    def num_tokens_E(self) -> jax.Array: ...
    @property
    def share_E(self) -> jax.Array: ...


class MixtureKernel(Protocol):
    """Routes tokens and sums their experts' results by weight (`kernels/experts/gpu.py`)."""

    def __call__(
        self,
        x_TD: jax.Array,
        logits_TE: jax.Array,
        valid_T: jax.Array,
        experts: Mapping[str, Any],
        gate: Callable[[jax.Array, jax.Array], jax.Array],
        offsets_E: jax.Array | None,
        factors_E: jax.Array | None,
    ) -> tuple[RoutingResult, jax.Array]: ...


@dataclasses.dataclass(frozen=True)
class Backend:
    """XLA alone, on an accelerator. A back end overrides what it offers beyond that.

    Attributes:
        linear: implementation of products, of `engine.kernels.linear`.
        attention: implementations of attention, best first, where none was measured.
        compiler_options: XLA's, for a step.
        autotunes: XLA tries tilings as it compiles, and loads measured ones (`autotune.py`).
        has_native_kernels: those of the native library (`kernels/cpu/`) run, once it is loaded.
        is_deterministic: `engine.deterministic` was measured.
        keeps_executables: files of executables are loaded before a step is traced.
        has_free_views: a reshape or a bitcast of an array is no copy.
        has_wide_reductions: reductions of a whole row of logits are fast.
        multiplies_all_types: XLA multiplies all types that weights have.
        sums_by_product: rows are summed by products with ones, whose order is the width's alone.
        scans_by_token: recurrences go through a chunk token by token.
        looks_up_in_products: a product reads the matrices of its rows where they lie in a stack.
        copies_in_blocks: what a product copies or expands of matrices, it does a block at a time.
        skips_zero_rows: products leave out rows of zeros.
        least_rows: of a product or a lookup.
        word: type of the words that planes of bits lie in (`low_bit.py`).
        prefetches_weights: weights are arguments of the program, which no kernel of it writes, so a
            product may read them while the launches before it still run.
        skinny_kernel: name of the kernel of `skinny_product`; None: there is none.
        rows: kernels of rows; None: XLA computes them.
        scan: a kernel of states (`kernels/recurrence/ffi_cpu.py`); None: by XLA.
    """

    linear: str = "reference"
    attention: tuple[str, ...] = ()
    compiler_options: tuple[tuple[str, object], ...] = ()
    autotunes: bool = False
    has_native_kernels: bool = False
    is_deterministic: bool = False
    keeps_executables: bool = False
    has_free_views: bool = True
    has_wide_reductions: bool = True
    multiplies_all_types: bool = True
    sums_by_product: bool = False
    scans_by_token: bool = False
    looks_up_in_products: bool = False
    copies_in_blocks: bool = False
    skips_zero_rows: bool = False
    least_rows: int = 1
    word: Word = np.uint8
    prefetches_weights: bool = False
    skinny_kernel: str | None = None
    rows: RowKernels | None = None
    scan: StateKernel | None = None

    def runs_on(self, device: Device) -> bool:
        return True

    def skinny_product(self, num_rows: int, w: jax.Array | Quantized) -> Kernel | None:
        """The kernel of products of blocks of so many rows with w; None: XLA's. It takes blocks
        [B, W, D], and a stack with i32[B], which of its matrices each block has, those without one
        last; or one block, and a matrix with None: float32 [B, W, F].
        """
        return None

    def why_no_product(self, w: jax.Array | Quantized) -> str:
        """Why `skinny_product` has no kernel for any rows and w; "" if w's format alone says it."""
        return ""

    def expanded(self, w: Quantized) -> jax.Array | None:
        """A matrix of few bits in its `dtype`; None: XLA expands it."""
        return None

    def grouped_product(self, w_EFD: jax.Array) -> Kernel | None:
        """The kernel of `grouped.grouped_product` for a stack; None: XLA's."""
        return None

    def addition(self, leaf: Adapted) -> Kernel | None:
        """The kernel that adds to a product, float32 [T, F], what the adapters of its rows [T, D]
        add; None: XLA's products.
        """
        return None

    def mixture(
        self, kind: Experts, num_tokens: int, gate_up: Any, down: Any
    ) -> MixtureKernel | None:
        """A `MixtureKernel` of few tokens for stacks of matrices, all of whose experts are here;
        None: XLA routes, and multiplies sorted rows.
        """
        return None

    def gated_product(
        self, x_TD: jax.Array, w: Any, activation: str, dtype: str
    ) -> jax.Array | None:
        """act(gate) up of one product, `dtype` [T, F / 2]; None: the gate is a step of its own."""
        return None

    def norm_of_sum(self, width: int) -> SumNorm | None:
        """A kernel that adds rows to the residual stream and norms the sum, so that a layer leaves
        to the next norm what it adds; None: XLA adds, and norms.
        """
        return None

    def append(self, attention: str, shape: tuple[int, int, int], has_norms: bool) -> Append | None:
        """A kernel that makes queries of what their product leaves, and writes keys and values to
        the pages of an implementation of attention, of N query and K key heads of H elements; None:
        by XLA.
        """
        return None

    def update(
        self, num_heads: int, num_keys: int, state: tuple[int, int], decays_of_keys: bool
    ) -> StateKernel | None:
        """`kernels.recurrence.api.update` for states [M, H] by a kernel; None: by XLA."""
        return None

    def convolution(self, widths: tuple[int, ...]) -> Convolution | None:
        """The kernel of `rows.convolve` for decode rows and parts so wide; None: by XLA."""
        return None

    def where_needed(
        self,
        is_needed: Callable[[], jax.Array],
        compute: Callable[..., _Out],
        shortcut: Callable[..., _Out],
        *operands: Any,
    ) -> _Out:
        """What is computed, or a shortcut where that has the same bits, or nothing reads them. A
        branch makes a GPU's host wait, so accelerators compute always.
        """
        return compute(*operands)

    def repeated(self, count: int, run: Callable[..., _State], state: _State) -> _State:
        """The state after `run(0, state)`, `run(1, ...)`, ...: unrolled, as a loop's turns cost
        launches.
        """
        for nth in range(count):
            state = run(nth, state)
        return state

    def computed_once(self, x_TX: jax.Array) -> jax.Array:
        """The same float32, which XLA does not compute again in every place that reads it."""
        return jax.lax.optimization_barrier(x_TX)
