"""Attention over pages: one signature, and the choice of who computes it."""

from types import ModuleType

import jax

from configs.errors import InputError
from layers.kernels import tuning
from layers.kernels.attention import reference
from layers.kernels.device import target_device

NAMES = ("reference", "pallas_gpu")


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
        InputError: the named implementation does not exist, or cannot run this here.
    """
    device = target_device()

    def limit(name: str) -> str | None:
        return _module(name).limit(q_CWNH, pages, deterministic, device)

    if implementation is None:
        winners = tuning.winners("attention", device.kind)
        implementation = next((name for name in winners if limit(name) is None), "reference")
    elif (reason := limit(implementation)) is not None:
        raise _refused(implementation, reason)
    return _module(implementation).attend_pages(
        q_CWNH, pages, table_CP, position_CW, window, deterministic, score_cap
    )


def check_dense(implementation: str | None) -> None:
    """Rows that attend among themselves have no pages, and no kernel.

    Raises:
        InputError: the named implementation does not exist, or reads pages.
    """
    if implementation is not None and _module(implementation) is not reference:
        raise _refused(implementation, "reads pages, and there is no cache")


def _refused(name: str, reason: str) -> InputError:
    return InputError(
        f"attention implementation {name!r} {reason}; 'reference' computes any attention anywhere"
    )


def _module(name: str) -> ModuleType:
    if name == "reference":
        return reference
    if name == "pallas_gpu":
        from layers.kernels.attention import gpu  # Mosaic takes its time to load

        return gpu
    known = ", ".join(map(repr, NAMES))
    raise InputError(f"attention implementation is {known} or None, not {name!r}")
