"""Which replica has seen the beginning of a prompt, and so may hold its pages."""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import msgspec

_FIRST_BYTES, _NUM_CUTS = 256, 9  # beginnings of 256 bytes to 64 KiB, each twice the one before
_MOST = 1 << 16  # of the beginnings that are remembered
_SLACK = 4  # requests that a replica may have more than the idlest, and still be preferred


class _Prompt(msgspec.Struct):
    """The fields of a body that a prompt is made of, as they are written there."""

    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


_DECODER = msgspec.json.Decoder(_Prompt)


def prefixes(body: bytes, client: str) -> list[bytes]:
    """Digests of longer and longer beginnings of a body's prompt, each for its client alone, as its
    cached pages are; none where there is no prompt or it is short.
    """
    try:
        found = _DECODER.decode(body)
    except (msgspec.DecodeError, RecursionError):  # which a replica explains to its sender
        return []
    text = bytes(found.messages) or bytes(found.prompt) or bytes(found.input)
    digest, digests, start = hashlib.blake2b(client.encode(), digest_size=16), [], 0
    for end in (_FIRST_BYTES << n for n in range(_NUM_CUTS)):
        if end > len(text):
            break
        digest.update(text[start:end])
        digests.append(digest.digest())
        start = end
    return digests


class Affinity:
    """Which replica was given which beginnings last; the latest `_MOST` are remembered."""

    def __init__(self) -> None:
        self._owners: OrderedDict[bytes, str] = OrderedDict()

    def preferred(self, digests: Sequence[bytes], loads: Mapping[str, int]) -> str | None:
        """The replica that has the longest of these beginnings, unless it has far more to do than
        another; None: whichever has the least to do.

        Args:
            digests: as `prefixes` returns them.
            loads: requests of each replica that can be chosen.
        """
        for digest in reversed(digests):
            owner = self._owners.get(digest)
            if owner is not None and owner in loads:
                return owner if loads[owner] <= min(loads.values()) + _SLACK else None
        return None

    def note(self, digests: Sequence[bytes], replica: str) -> None:
        """A replica was given a prompt."""
        for digest in digests:
            self._owners[digest] = replica
            self._owners.move_to_end(digest)
        while len(self._owners) > _MOST:
            self._owners.popitem(last=False)
