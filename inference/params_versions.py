"""Versions of an engine's weights, and which of them its answers came from."""

from collections.abc import Iterable

from inference.scheduling.sequence import Sequence


class ParamsVersions:
    """Counts the weights that an engine has had.

    Attributes:
        current: 0 at first.
    """

    def __init__(self) -> None:
        self.current = 0
        self._kept: tuple[int, ...] = ()  # older ones, whose pages may still be cached

    def advance(self, keeps_pages: bool, unfinished: Iterable[Sequence]) -> None:
        """There are new weights. Where pages are kept, what is computed of unfinished sequences
        stays the old ones'.
        """
        if keeps_pages:
            for sequence in unfinished:
                if sequence.num_computed_tokens or sequence.leader:
                    sequence.note_params(self.current)
            self._kept += (self.current,)
        self.current += 1

    def forget_pages(self) -> None:
        """No page is cached any more."""
        self._kept = ()

    def note(self, sequence: Sequence, has_read_pages: bool) -> None:
        """Names in a sequence what its newest results came from.

        Args:
            sequence: the sequence.
            has_read_pages: whether it may have read what others computed.
        """
        for version in (*(self._kept if has_read_pages else ()), self.current):
            sequence.note_params(version)
