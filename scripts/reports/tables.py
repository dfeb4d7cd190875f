"""Tables, sizes and times as plans print them."""

from collections.abc import Sequence

from rich.table import Table

_WORDS = ("", "combination", "operation", "bound", "mesh", "limit", "drafts", "fits", "in the best",
          "costs", "exchange", "axis", "kind", "hidden", "cache", "step")  # fmt: skip


def new_table(columns: Sequence[str]) -> Table:
    """An empty table; words are at the left, figures at the right."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="left" if column in _WORDS else "right")
    return table


def yes(value: bool) -> str:
    """'yes' or 'no'."""
    return "yes" if value else "no"


def size(num_bytes: float) -> str:
    """Bytes in the unit that suits them."""
    for unit, whole in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= whole:
            return f"{num_bytes / whole:,.4g} {unit}"
    return f"{num_bytes:,.0f} B"


def seconds(duration: float) -> str:
    """Seconds in the unit that suits them."""
    for unit, whole in (("s", 1.0), ("ms", 1e-3)):
        if duration >= whole:
            return f"{duration / whole:.4g} {unit}"
    return f"{duration * 1e6:.4g} us"


def bandwidth_share(share: float, bandwidth: float) -> str:
    """The share of the memory's bandwidth (bytes/s); what is read faster comes from caches."""
    memory = f"{bandwidth / 1e9:.0f} GB/s"
    return f"{100 * share:.0f} % of {memory}" if share <= 1 else f"from caches, above {memory}"
