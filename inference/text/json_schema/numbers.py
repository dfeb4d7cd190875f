"""Keywords of numbers, whose values the compiler reads as float64."""

from decimal import Decimal
from typing import Any

from configs.errors import InputError, shown

KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_MAX_DIGITS = 18  # before the point: the compiler's integers have 64 bits
_MAX_DECIMALS = 30
_MAX_EXACT = 1 << 53  # where float64 ends to count by ones
# They name a type of 64 bits, as `format` does, or of float32 and float64.
_TYPE_LIMITS = (2**63 - 1, 2**63, 2**64 - 1, 2**64, 3.4028234663852886e38, 1.7976931348623157e308)
_MAX_COEFFICIENT = 10_000  # of `multipleOf`: the compiler has a state for each remainder


def lower(schema: dict[str, object], place: str) -> tuple[dict[str, Any], bool]:
    """The keywords of numbers that are obeyed, and whether bounds at a type's limits are left out.

    Raises:
        InputError: a value cannot be obeyed exactly.
    """
    result: dict[str, Any] = {}
    is_relaxed = False
    for name, value in _modern(schema).items():
        where = f"{place}{name}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(f"{where}={shown(value)}: is a number")
        if name == "multipleOf":
            _check_multiple(value, where)
            result[name] = value
            continue
        sign = -1 if name in ("minimum", "exclusiveMinimum") else 1
        if sign * value in _TYPE_LIMITS:
            is_relaxed = True
            continue
        check(value, where)
        if name.startswith("exclusive") and isinstance(value, int):
            if schema.get("type") == "integer":  # the compiler would add 1 to a float64
                name, value = ("minimum", value + 1) if sign < 0 else ("maximum", value - 1)
                check(value, where)
            elif abs(value) >= _MAX_EXACT:
                raise InputError(f'{where}={value}: beyond 2^53 it needs "type": "integer"')
        tighter = max if sign < 0 else min
        result[name] = tighter(value, result[name]) if name in result else value
    return result, is_relaxed


def check(value: float, where: str) -> None:
    """Raises InputError unless a number is a float64 exactly, with few enough digits."""
    if isinstance(value, int):
        if abs(value) >= 10**_MAX_DIGITS:
            raise InputError(f"{where}={shown(value)}: has at most {_MAX_DIGITS} digits")
        if int(float(value)) != value:
            raise InputError(
                f"{where}={value}: would become {int(float(value))}, the nearest float64; beyond "
                "2^53 use an integer that is one"
            )
        return
    is_short = abs(value) < 10**_MAX_DIGITS
    if not is_short or -int(_decimal(value).as_tuple().exponent) > _MAX_DECIMALS:
        raise InputError(
            f"{where}={value}: has at most {_MAX_DIGITS} digits before the point and "
            f"{_MAX_DECIMALS} behind it"
        )
    if abs(value) > _MAX_EXACT and len(Decimal(repr(value)).normalize().as_tuple().digits) > 15:
        raise InputError(f"{where}={value}: may have lost digits: write it as an integer")


def check_values(value: object, where: str) -> None:
    """Calls `check` for all numbers within a value of `const` or `enum`."""
    if isinstance(value, dict | list):
        for child in value.values() if isinstance(value, dict) else value:
            check_values(child, where)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        check(value, where)


def _modern(schema: dict[str, object]) -> dict[str, object]:
    """The keywords, of which draft 4 has exclusive bounds as a word beside the bound."""
    result = {name: schema[name] for name in KEYWORDS if name in schema}
    for exclusive, plain in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(result.get(exclusive), bool) and result.pop(exclusive) and plain in result:
            result[exclusive] = result.pop(plain)
    return result


def _check_multiple(value: float, where: str) -> None:
    if not 0 < value < 10**_MAX_DIGITS:
        raise InputError(f"{where}={shown(value)}: is above 0, of at most {_MAX_DIGITS} digits")
    decimals, scaled = 0, float(value)
    while not scaled.is_integer():  # as the compiler reads it
        decimals, scaled = decimals + 1, scaled * 10
    if scaled > _MAX_COEFFICIENT or Decimal(int(scaled)).scaleb(-decimals) != _decimal(value):
        raise InputError(
            f"{where}={shown(value)}: has at most {_MAX_COEFFICIENT} units of its last decimal "
            "place, and is exact when float64 moves its point"
        )


def _decimal(value: float) -> Decimal:
    return Decimal(repr(value))
