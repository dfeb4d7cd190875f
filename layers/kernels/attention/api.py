"""Attention over pages: one signature, and the choice of who computes it."""

from types import ModuleType

import jax

from configs.errors import InputError
from layers.kernels import tuning
from layers.kernels.attention import reference

NAMES = ("reference",)


def attend_pages(
    q_CWNH: jax.Array,
    pages: jax.Array,
    table_CP: jax.Array,
    position_CW: jax.Array,
    window: int | None,
    deterministic: bool = False,
    score_cap: float | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """`reference.attend_pages`, computed by the named implementation; for None by the first that
    can and that a committed measurement puts before the reference on this kind of device.

    Raises:
        InputError: the named implementation does not exist.
    """
    name = implementation or _best()
    return _module(name).attend_pages(
        q_CWNH, pages, table_CP, position_CW, window, deterministic, score_cap
    )


def check_dense(implementation: str | None) -> None:
    """Rows that attend among themselves have no pages, and no kernel.

    Raises:
        InputError: the named implementation does not exist, or reads pages.
    """
    if implementation is not None and _module(implementation) is not reference:
        raise InputError(
            f"attention implementation {implementation!r} reads pages; without a cache 'reference' "
            "computes attention"
        )


def _best() -> str:
    winners = tuning.winners("attention", jax.devices()[0].device_kind)
    return next((name for name in winners if name in NAMES), "reference")


def _module(name: str) -> ModuleType:
    if name == "reference":
        return reference
    known = ", ".join(map(repr, NAMES))
    raise InputError(f"attention implementation is {known} or None, not {name!r}")
