"""What a chip costs."""

import math

from absl import flags

from configs.errors import InputError

PRICE = flags.DEFINE_float("price", None, "Dollars an hour of one chip.")


def price() -> float | None:
    """Of a chip; raises InputError unless it is a finite number above 0."""
    if PRICE.value is not None and not 0 < PRICE.value < math.inf:
        raise InputError(f"--price is a number of dollars an hour above 0, not {PRICE.value}")
    return PRICE.value
