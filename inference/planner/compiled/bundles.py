"""Cycles of a TPU kernel's loops, counted in the schedule that its compiler made of it.

A bundle is what one core issues in one cycle. The schedule has waits for results as empty bundles,
so its length is the time of a loop whose copies have arrived; waits for memory are not in it. The
device need not be there, nor jax be loaded.

libtpu writes schedules where `flags` are in LIBTPU_INIT_ARGS before it is loaded: of each operation
its bundles, and how many of each unit's slots each of them takes.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

_BUNDLES, _SLOTS = "packed-bundles-post-ra", "pre-delay_hlo-static-per-bundle-utilization"
_DELAY = 4  # bundles after a branch that are issued with it
GRANULE_BYTES = 32  # in which sizes of copies are written


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop of a kernel, or the whole kernel.

    Attributes:
        cycles: bundles of an iteration, without those of inner loops.
        slots: of its units ('MXU', 'VALU', 'VLOAD', ...) that these bundles take.
        copies: bytes of the copies that it starts or awaits, as far as they are constant.
        loops: inner loops, in order.
    """

    cycles: int
    slots: Mapping[str, int]
    copies: frozenset[int]
    loops: tuple["Loop", ...]

    @property
    def multiplies(self) -> bool:
        """Whether it has products itself."""
        return self.slots.get("MXU", 0) > 0

    def walk(self) -> list["Loop"]:
        """This loop and all inner ones."""
        return [self, *(inner for loop in self.loops for inner in loop.walk())]

    def block(self, page_bytes: int, num_pages: int, num_products: int = 1) -> "Loop":
        """An iteration over a block of pages, as long as they come, with its inner loops inside.

        An inner loop that copies pages runs once for each, one with products `num_products`
        times, one with either inside once. Others belong to the block with new tokens alone.
        """
        cycles, slots = self.cycles, Counter(self.slots)
        for loop in self.loops:
            inside = loop.block(page_bytes, num_pages)
            if page_bytes in loop.copies:
                trips = num_pages
            elif loop.multiplies:
                trips = num_products
            else:
                trips = int(page_bytes in inside.copies or inside.multiplies)
            cycles += trips * inside.cycles
            slots.update({unit: trips * number for unit, number in inside.slots.items()})
        copies = self.copies.union(*(loop.copies for loop in self.walk()))
        return Loop(cycles, slots, copies, ())


def flags(directory: str | Path) -> str:
    """Flags of libtpu with which it writes schedules into a directory."""
    return (
        f"--xla_jf_dump_to={directory} --xla_jf_dump_llo_text=true "
        f"--xla_jf_dump_llo_pass_label_regex={_BUNDLES}|{_SLOTS}"
    )


def read(directory: str | Path, kernel: str) -> Loop:
    """The one kernel whose name begins like this, from what libtpu wrote.

    Raises:
        ValueError: there is no such kernel, or another, or the two files do not belong together.
    """
    bundles, slots = (_only(Path(directory), kernel, label) for label in (_BUNDLES, _SLOTS))
    return parse(bundles.read_text(encoding="utf-8"), slots.read_text(encoding="utf-8"))


def _only(directory: Path, kernel: str, label: str) -> Path:
    pattern = re.compile(rf"\d+-{re.escape(kernel)}.*-\d+-{re.escape(label)}\.txt")
    paths = [path for path in directory.iterdir() if pattern.fullmatch(path.name)]
    if len(paths) != 1:
        raise ValueError(f"{directory} has {len(paths)} schedules of a kernel {kernel}, not one")
    return paths[0]


def parse(bundles: str, slots: str) -> Loop:
    """A kernel from its two texts; `read` has the errors."""
    listed = re.findall(r"^ *(0x[0-9a-f]+|0) +(?:[A-Z]{2})? *:(.*)$", bundles, re.MULTILINE)
    texts = {int(address, 16): text for address, text in listed}
    header, _, table = slots.partition("== UTILIZATION:\n")
    units = [unit.strip() for unit in header.splitlines()[1].split(",")]
    taken = [tuple(map(int, line.split())) for line in table.splitlines() if line.strip()]
    if sorted(texts) != list(range(len(taken))):
        raise ValueError(f"a schedule of {len(texts)} bundles has slots of {len(taken)}")
    spans = [(0, len(taken) - 1)]
    for address, text in texts.items():
        for target in re.findall(r"sbr\.rel .*?bundleno = (\d+)", text):
            if int(target) <= address:
                spans.append((int(target), address + _DELAY))
    return _nested(sorted(spans, key=lambda span: (span[0], -span[1])), texts, units, taken)


def _nested(
    spans: Sequence[tuple[int, int]],
    texts: Mapping[int, str],
    units: Sequence[str],
    taken: Sequence[tuple[int, ...]],
) -> Loop:
    """The loop of the first span, with those of the others inside."""
    (begin, end), *inside = spans
    bundles, loops = set(range(begin, end + 1)), []
    while inside:
        first, last = inside[0]
        inner = [span for span in inside if span[1] <= last]
        loops.append(_nested(inner, texts, units, taken))
        bundles -= set(range(first, last + 1))
        inside = inside[len(inner) :]
    counts: Counter[str] = Counter()
    copies: set[int] = set()
    for address in bundles:
        counts.update(dict(zip(units, taken[address], strict=True)))
        sizes = re.findall(
            r"dma\.done\.wait [^,]*, (\d+)|size_in_granules=\*/(\d+)", texts[address]
        )
        copies.update(GRANULE_BYTES * int(a or b) for a, b in sizes)
    return Loop(len(bundles), dict(counts), frozenset(copies), tuple(loops))
