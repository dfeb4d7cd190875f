"""The flags that say how small a child is to be, which two apps share."""

import math
from typing import TYPE_CHECKING

from absl import flags

from configs.errors import InputError

if TYPE_CHECKING:
    from configs.hardware.spec import HardwareSpec
    from inference.prune.budget import Budget

_PARAMS = flags.DEFINE_float(
    "target_params",
    None,
    "prune: share of the parameters, embeddings apart, that stays: shapes are tried, and the one "
    "with the least loss is written; --widths are fixed. plan --advise: names the shape to train.",
)
_LATENCY_MS = flags.DEFINE_float(
    "target_latency_ms",
    None,
    "In place of --target_params: milliseconds of a decode step of one sequence on --hardware that "
    "the smaller model may take, as predicted.",
)


def is_present() -> bool:
    """Returns whether one of them is set."""
    return _PARAMS.value is not None or _LATENCY_MS.value is not None


def name() -> str:
    """Returns the name of the one that is set."""
    return _LATENCY_MS.name if _PARAMS.value is None else _PARAMS.name


def check() -> None:
    """Raises InputError if both are set, or one to no size."""
    share, latency = _PARAMS.value, _LATENCY_MS.value
    if share is not None and latency is not None:
        raise InputError(
            f"--target_latency_ms={latency}: does not go with --target_params; give one of them"
        )
    if share is not None and not 0 < share < 1:
        raise InputError(f"--target_params={share}: must be a share between 0 and 1")
    if latency is not None and not 0 < latency < math.inf:
        raise InputError(f"--target_latency_ms={latency}: must be a finite number above 0")


def read(hardware: "HardwareSpec", context: int | None = None) -> "Budget":
    """Returns the budget of the one that is set; `context`: tokens before the step."""
    from inference.prune.budget import CONTEXT, Budget

    latency_s = None if _LATENCY_MS.value is None else _LATENCY_MS.value / 1000
    return Budget(hardware, _PARAMS.value, latency_s, context=context or CONTEXT)
