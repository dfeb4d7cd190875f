"""Rows with adapters of their own, and what these add to a product in float64."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from layers.kernels.linear import adapted_cpu, packed
from layers.kernels.linear.adapted import Adapted, SlotOrder

RANKS = 5, 0, 32  # the second slot changes nothing


def drawn(seed, *shape, dtype="float32"):
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype))


@dataclasses.dataclass
class Case:
    """Rows, their slots (-1: none), and adapters as they are and as a leaf takes them."""

    x_TD: np.ndarray
    slot_T: np.ndarray
    down: np.ndarray
    up: np.ndarray
    ends: tuple[int, ...]
    ranks_N: np.ndarray

    @classmethod
    def of(cls, T, D, ends, dtype="float32", slot_T=None, ranks=RANKS, room=32):
        ranks_N = np.array(ranks, np.int32)
        N = len(ranks_N)
        slot_T = np.random.default_rng(T).integers(-1, N, T) if slot_T is None else slot_T
        down = drawn(2, N, len(ends), room, D, dtype=dtype)
        up = drawn(3, N, ends[-1], room, dtype=dtype)
        for slot, rank in enumerate(ranks_N):
            down[slot, :, rank:], up[slot, :, rank:] = 0, 0
        x_TD = drawn(T, T, D, dtype=dtype)
        x_TD[T // 2 : T // 2 + T // 5] = 0  # as padding
        return cls(x_TD, slot_T, down.reshape(N, -1, D), up, ends, ranks_N)

    def leaf(self, weight, packs=True, rows=slice(None)):
        order = SlotOrder.of(jnp.asarray(self.slot_T[rows]), len(self.ranks_N))
        down, up = self.down, self.up
        both = (
            (packed.pack(down), adapted_cpu.pack_up(up)) if packs else map(jnp.asarray, (down, up))
        )
        return Adapted(weight, *both, self.ends, order, jnp.asarray(self.ranks_N))

    def check(self, sums, base, dtype):
        """Sums are the base's, and what adapters add; rows that none changes have its bits."""
        added, size = self._added()
        near = size * (0.01 if dtype == "bfloat16" else 1e-6) + 1e-6 * (1 + np.abs(base))
        assert sums.shape == base.shape and sums.dtype == np.float32
        assert (np.abs(sums - (base + added)) <= near).all()
        changes = (self.slot_T >= 0) & (self.ranks_N[self.slot_T] > 0)
        np.testing.assert_array_equal(sums[~changes], base[~changes])
        is_used_T = self.x_TD.any(1)
        assert (sums[changes & is_used_T] != base[changes & is_used_T]).any(1).all()
        assert not sums[~is_used_T].any()

    def _added(self):
        """What is added to each row, in float64, and the sum of its sizes."""
        x_TD, starts = self.x_TD.astype(np.float64), (0, *self.ends[:-1])
        added, size = np.zeros((2, len(x_TD), self.ends[-1]))
        for t, slot in enumerate(self.slot_T):
            if slot < 0:
                continue
            down, up = self.down[slot].astype(np.float64), self.up[slot].astype(np.float64)
            low = np.split(down @ x_TD[t], len(starts))
            lows = np.split(np.abs(down) @ np.abs(x_TD[t]), len(starts))
            for nth, (start, end) in enumerate(zip(starts, self.ends, strict=True)):
                added[t, start:end] = up[start:end] @ low[nth]
                size[t, start:end] = np.abs(up[start:end]) @ lows[nth]
        return added, size
