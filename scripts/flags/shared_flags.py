"""Flags that two apps share, so that one process can load both, and how lists are read."""

from collections.abc import Collection

from absl import flags

from configs.errors import InputError

NEW_TOKENS = flags.DEFINE_integer(
    "new_tokens", 48, "Tokens to generate a request (`plan`: none unless given)."
)
DEVICE = flags.DEFINE_enum(
    "device",
    "auto",
    ["auto", "cpu", "gpu", "tpu"],
    "Whatever JAX computes on; or that, or nothing.",
)
REPEATS = flags.DEFINE_integer("repeats", 3, "Measurements of each; medians are reported.")
RATE = flags.DEFINE_float("rate", None, "Requests a second (`plan`: to keep --slo for).")


def whole_numbers(flag: flags.FlagHolder[str]) -> list[int]:
    """A flag's numbers, separated by commas; raises InputError unless they are whole, from 1 on."""
    numbers = [number.strip() for number in flag.value.split(",")]
    if not all(n.isascii() and n.isdigit() and len(n) < 16 and int(n) > 0 for n in numbers):
        raise InputError(
            f"--{flag.name} takes whole numbers from 1, separated by commas, not "
            f"{flag.value[:80]!r}"
        )
    return [int(number) for number in numbers]


def whole_number(flag: flags.FlagHolder[str]) -> int:
    """A flag's only number; raises InputError if there are more, or as `whole_numbers`."""
    numbers = whole_numbers(flag)
    if len(numbers) > 1:
        raise InputError(f"--{flag.name} is one number here, not {flag.value[:80]!r}")
    return numbers[0]


def chosen(flag: flags.FlagHolder[list[str] | None], names: Collection[str]) -> list[str]:
    """The names that a flag lists, in their order (default: all); raises InputError for another."""
    for name in flag.value or ():
        if name not in names:
            raise InputError(f"--{flag.name} lists some of {', '.join(names)}, not {name!r}")
    return [name for name in names if flag.value is None or name in flag.value]
