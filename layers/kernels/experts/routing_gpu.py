"""Routing of few tokens on Hopper GPUs (Pallas, Mosaic GPU), in one launch: scores of the router's
logits, the best experts of each token by repeated maxima, their weights, and a list of the experts
that any token is routed to.

One warpgroup has experts as rows and tokens as columns of its registers, so a maximum over experts
is one reduction. Tokens go through in blocks where registers are short.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from configs.kinds.experts import Router
from layers.kernels.registers import load

_MOST_TOKENS, _MOST_EXPERTS = 64, 512
_ROWS, _COLUMNS = 64, 8  # of a tile of registers
_MOST_ELEMENTS = 4096  # of a block of tokens: 32 registers a thread
_BOX, _NUMBERS_OF_BOX = 256, 4  # of the copy engine along an axis, at most and at least
_TILE = plgpu.Layout.WGMMA
_TILE_ROWS, _TILE_COLUMNS = _TILE.reduce(1), _TILE.reduce(0)
_LEAST_SUM = 1e-20  # of scores that all vanish, as in `feed_forwards/routing.py`


class UsedExperts(NamedTuple):
    """The experts of T tokens.

    Attributes:
        weights_EW: float32, W = T rounded up to a multiple of 8; 0 where a token is not routed to
            an expert.
        used: i32[E + 4], the number of experts with tokens, these in ascending order, then E.
        num_tokens_E: i32, the number of tokens of each expert.
        share_E: float32, the mean over valid tokens of their scores, each token's summing to 1.
    """

    weights_EW: jax.Array
    used: jax.Array
    num_tokens_E: jax.Array
    share_E: jax.Array


def can_route(router: Router, num_tokens: int, num_experts: int, top_k: int) -> bool:
    """Whether the kernel chooses as the router does. It has no tables of experts by token id, no
    choice one by one (`Router.jitter`), and none of experts outside of the best groups.
    """
    num_eligible = num_experts // router.num_groups * router.top_groups
    return (
        not router.table_rows
        and router.jitter is None
        and top_k <= num_eligible
        and num_tokens <= _MOST_TOKENS
        and num_experts <= _MOST_EXPERTS
        and num_experts % _NUMBERS_OF_BOX == 0
    )


def route(
    logits_TE: jax.Array,
    valid_T: jax.Array,
    router: Router,
    top_k: int,
    offsets_E: jax.Array | None = None,
    factors_E: jax.Array | None = None,
    interpret: object = None,
) -> UsedExperts:
    """Chooses `top_k` experts for each valid token, as `feed_forwards.routing.route`.

    Args:
        logits_TE: float32, with their bias.
        valid_T: bool, False for padding, which is routed to no expert.
        router: one that `can_route` allows.
        offsets_E: float32 offsets of the choice (`Router.has_offsets`).
        factors_E: float32 factors of the weights (`Router.has_factors`).
        interpret: takes `InterpretGPUParams`.
    """
    T, E = logits_TE.shape
    W, rows = -(-T // _COLUMNS) * _COLUMNS, -(-E // _ROWS) * _ROWS
    block = _block_tokens(W, rows)
    logits_EW = jnp.pad(logits_TE.T, ((0, rows - E), (0, W - T)))
    # All layers have the same.
    valid_W = jnp.pad(valid_T, (0, W - T)).astype(jnp.int32)
    num_valid_1 = jnp.maximum(valid_T.sum(dtype=jnp.int32), 1)[None]
    vectors = [vector_E for vector_E in (offsets_E, factors_E) if vector_E is not None]

    def kernel(
        logits_ref, valid_ref, num_valid_ref, *refs, logits_smem, weights_smem, count_smem,
        share_smem, before_smem, used_smem, arrived, vectors_smem=None,
    ):  # fmt: skip
        *vector_refs, weights_ref, used_ref, num_tokens_ref, share_ref = refs
        if not interpret:
            plgpu.griddepcontrol_wait()
            plgpu.griddepcontrol_launch_dependents()
        expert_EW = lax.broadcasted_iota(jnp.int32, (rows, block), 0)

        def fetch(ref, smem):
            plgpu.copy_gmem_to_smem(ref, smem, arrived)
            plgpu.barrier_wait(arrived)

        def of_tokens(x_W):
            return lax.broadcast_in_dim(x_W, (rows, block), (1,))

        def of_experts(x_E):
            return lax.broadcast_in_dim(x_E, (rows, block), (0,))

        def choose(n, totals):
            tokens = pl.ds(n * block, block)
            for part in _boxes(rows):
                fetch(logits_ref.at[part, tokens], logits_smem.at[part])
            logits_EW = load(logits_smem, _TILE, interpret)
            valid_W = load(valid_ref.at[tokens], _TILE_COLUMNS, interpret)
            is_choice_EW = (expert_EW < E) & (of_tokens(valid_W) != 0)
            logits_EW = jnp.where(is_choice_EW, logits_EW, -jnp.inf)
            scores_EW = jnp.where(is_choice_EW, _scores(router.scores, logits_EW), 0)
            choice_EW = scores_EW
            if offsets_E is not None:
                choice_EW += of_experts(load(vectors_smem.at[0], _TILE_ROWS, interpret))
            choice_EW = jnp.where(is_choice_EW, choice_EW, -jnp.inf)
            if router.top_groups < router.num_groups:
                choice_EW = _of_best_groups(router, choice_EW, expert_EW, E)

            def without_best(_, open_EW):
                return jnp.where(expert_EW == of_tokens(_best(open_EW)), -jnp.inf, open_EW)

            open_EW = lax.fori_loop(0, top_k, without_best, choice_EW)
            is_routed_EW = (open_EW == -jnp.inf) & (choice_EW != -jnp.inf)
            weights_EW = jnp.where(is_routed_EW, scores_EW, 0)
            if router.is_normalized:
                weights_EW /= of_tokens(weights_EW.sum(0) + _LEAST_SUM)
            if factors_E is not None:
                factor_E = load(vectors_smem.at[len(vectors) - 1], _TILE_ROWS, interpret)
                weights_EW *= of_experts(factor_E)
            weights_smem[...] = weights_EW * router.scale
            sum_W = scores_EW.sum(0)
            shares_EW = scores_EW / of_tokens(jnp.where(sum_W == 0, 1, sum_W))
            num_tokens_E = jnp.where(is_routed_EW, 1, 0).sum(1)
            plgpu.commit_smem()
            for part in _boxes(E):
                plgpu.copy_smem_to_gmem(weights_smem.at[part], weights_ref.at[part, tokens])
            plgpu.wait_smem_to_gmem(0)
            return totals[0] + num_tokens_E, totals[1] + shares_EW.sum(1)

        for nth, vector_ref in enumerate(vector_refs):
            for part in _boxes(E):
                fetch(vector_ref.at[part], vectors_smem.at[nth, part])
        totals = jnp.zeros(rows, jnp.int32), jnp.zeros(rows, jnp.float32)
        count_smem[...], share_E = lax.fori_loop(0, W // block, choose, totals)
        share_smem[...] = share_E / num_valid_ref[0].astype(jnp.float32)
        _list_used(count_smem, before_smem, used_smem, E, interpret)
        plgpu.commit_smem()
        for smem, ref in (
            (used_smem, used_ref), (count_smem, num_tokens_ref), (share_smem, share_ref)
        ):  # fmt: skip
            for part in _boxes(len(ref)):
                plgpu.copy_smem_to_gmem(smem.at[part], ref.at[part])
        plgpu.wait_smem_to_gmem(0)

    scratch: dict[str, pl.MemoryRef | plgpu.Barrier] = dict(
        logits_smem=plgpu.SMEM((rows, block), jnp.float32),
        weights_smem=plgpu.SMEM((rows, block), jnp.float32),
        count_smem=plgpu.SMEM((rows,), jnp.int32),
        share_smem=plgpu.SMEM((rows,), jnp.float32),
        before_smem=plgpu.SMEM((rows,), jnp.int32),
        used_smem=plgpu.SMEM((rows + _ROWS,), jnp.int32),
        arrived=plgpu.Barrier(),
    )
    if vectors:
        scratch["vectors_smem"] = plgpu.SMEM((len(vectors), rows), jnp.float32)
    outs = (
        jax.ShapeDtypeStruct((E, W), jnp.float32),
        jax.ShapeDtypeStruct((E + _NUMBERS_OF_BOX,), jnp.int32),
        jax.ShapeDtypeStruct((E,), jnp.int32),
        jax.ShapeDtypeStruct((E,), jnp.float32),
    )
    return UsedExperts(
        *plgpu.kernel(
            kernel,
            out_type=outs,
            scratch_types=scratch,
            kernel_name="route",
            compiler_params=plgpu.CompilerParams(
                lowering_semantics=plgpu.LoweringSemantics.Warpgroup, reduction_scratch_bytes=6144
            ),
            interpret=interpret,
        )(logits_EW, valid_W, num_valid_1, *vectors)
    )


def _boxes(size: int) -> list[pl.Slice]:
    return [pl.Slice(start, min(_BOX, size - start)) for start in range(0, size, _BOX)]


def _block_tokens(num_tokens: int, num_rows: int) -> int:
    """The most of W tokens whose elements fit in registers, in equal blocks."""
    most = max(1, _MOST_ELEMENTS // num_rows // _COLUMNS)
    tiles = num_tokens // _COLUMNS
    return _COLUMNS * next(n for n in range(most, 0, -1) if tiles % n == 0)


def _scores(name: str, logits_EW: jax.Array) -> jax.Array:
    """`Router.scores` of the logits, of which padding has -inf."""
    if name == "softmax":
        mass_EW = jnp.exp(logits_EW - _to_rows(logits_EW.max(0), logits_EW))
        return mass_EW / _to_rows(mass_EW.sum(0), logits_EW)
    if name == "sigmoid":
        return 1 / (1 + jnp.exp(-logits_EW))
    small_EW = jnp.exp(-jnp.abs(logits_EW))
    whole_EW = 1 + small_EW  # Kahan's log1p, exact where the sum rounds
    log_EW = jnp.log(whole_EW) * small_EW / jnp.where(whole_EW == 1, 1, whole_EW - 1)
    log_EW = jnp.where(whole_EW == 1, small_EW, log_EW)
    softplus_EW = jnp.maximum(logits_EW, 0) + log_EW
    return jnp.where(softplus_EW == 0, 0, softplus_EW * lax.rsqrt(softplus_EW))


def _best(choice_EW: jax.Array) -> jax.Array:
    """i32[W], the expert of each token's largest number, as `jax.lax.top_k`: of equal ones the
    first, and NaN before all.
    """
    expert_EW = lax.broadcasted_iota(jnp.int32, choice_EW.shape, 0)
    is_best_EW = choice_EW == _to_rows(choice_EW.max(0), choice_EW)
    is_best_EW |= choice_EW != choice_EW
    return jnp.where(is_best_EW, expert_EW, len(choice_EW)).min(0)


def _to_rows(x_W: jax.Array, like_EW: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(x_W, like_EW.shape, (1,))


def _of_best_groups(
    router: Router, choice_EW: jax.Array, expert_EW: jax.Array, num_experts: int
) -> jax.Array:
    """-inf for experts of other groups than each token's best ones; of equal groups the first."""
    size, totals = num_experts // router.num_groups, []
    for group in range(router.num_groups):
        is_group_EW = (expert_EW >= group * size) & (expert_EW < (group + 1) * size)
        open_EW = jnp.where(is_group_EW, choice_EW, -jnp.inf)
        total_W = open_EW.max(0)
        for _ in range(router.group_best - 1):
            open_EW = jnp.where(expert_EW == _to_rows(_best(open_EW), open_EW), -jnp.inf, open_EW)
            total_W += open_EW.max(0)
        totals.append(total_W)
    for group, total_W in enumerate(totals):
        better = [
            jnp.where((other_W >= total_W) if other < group else (other_W > total_W), 1, 0)
            for other, other_W in enumerate(totals)
            if other != group
        ]
        is_eligible_W = sum(better[1:], better[0]) < router.top_groups
        is_group_EW = (expert_EW >= group * size) & (expert_EW < (group + 1) * size)
        is_out_EW = is_group_EW & (_to_rows(jnp.where(is_eligible_W, 1, 0), choice_EW) == 0)
        choice_EW = jnp.where(is_out_EW, -jnp.inf, choice_EW)
    return choice_EW


def _list_used(count_smem, before_smem, used_smem, num_experts: int, interpret: object) -> None:
    """Writes how many experts have a token, these in order, then `num_experts`. The n-th of them,
    from 0 on, is the number of experts up to which at most n have one.
    """
    (rows,) = count_smem.shape
    shape = _ROWS, rows
    column_RE = lax.broadcasted_iota(jnp.int32, shape, 1)

    def row(n):
        return n * _ROWS + lax.broadcasted_iota(jnp.int32, shape, 0)

    def along_rows(smem):
        return lax.broadcast_in_dim(load(smem, _TILE_COLUMNS, interpret), shape, (1,))

    def count_before(n, _):
        is_used_RE = (along_rows(count_smem) > 0) & (column_RE <= row(n))
        before_smem[pl.ds(n * _ROWS, _ROWS)] = jnp.where(is_used_RE, 1, 0).sum(1)

    def nth_expert(n, _):
        is_before_RE = (along_rows(before_smem) < row(n)) & (column_RE < num_experts)
        is_used_RE = (along_rows(count_smem) > 0) & (row(n) == 0)
        used_smem[pl.ds(n * _ROWS, _ROWS)] = jnp.where(is_before_RE | is_used_RE, 1, 0).sum(1)

    lax.fori_loop(0, rows // _ROWS, count_before, None)
    lax.fori_loop(0, rows // _ROWS + 1, nth_expert, None)
