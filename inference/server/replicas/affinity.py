"""Remembers which replica got the beginning of a prompt, and so may have its pages cached."""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import msgspec

_FIRST_BYTES, _NUM_CUTS = 256, 9  # beginnings of 256 bytes, 512, ... 64 KiB
_MAX_PREFIXES = 1 << 16  # remembered
_SLACK = 4  # a preferred replica may have so many requests more than the idlest


class _PromptFields(msgspec.Struct):
    """The fields of a body that contain the prompt, as raw JSON."""

    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    input_prefix: msgspec.Raw = msgspec.Raw()


_DECODER = msgspec.json.Decoder(_PromptFields)


def prefixes(body: bytes, client: str) -> list[bytes]:
    """Digests of longer and longer beginnings of a body's prompt. They depend on the client, as
    cached pages do. A body without a prompt, or with a short one, has none.
    """
    try:
        fields = _DECODER.decode(body)
    except (msgspec.DecodeError, RecursionError):  # the replica will answer with the error
        return []
    sources = fields.input_prefix, fields.messages, fields.prompt, fields.input
    text = next(filter(None, map(bytes, sources)), b"")
    digest, digests, start = hashlib.blake2b(client.encode(), digest_size=16), [], 0
    for end in (_FIRST_BYTES << n for n in range(_NUM_CUTS)):
        if end > len(text):
            break
        digest.update(text[start:end])
        digests.append(digest.digest())
        start = end
    return digests


class Affinity:
    """Maps the latest `_MAX_PREFIXES` beginnings of prompts to the replica that last got them."""

    def __init__(self) -> None:
        self._owners: OrderedDict[bytes, str] = OrderedDict()

    def preferred(self, digests: Sequence[bytes], loads: Mapping[str, int]) -> str | None:
        """The replica with the longest of these beginnings; None if there is none, or if it has
        over `_SLACK` requests more than the idlest.
        """
        for digest in reversed(digests):
            owner = self._owners.get(digest)
            if owner is not None and owner in loads:
                return owner if loads[owner] <= min(loads.values()) + _SLACK else None
        return None

    def note(self, digests: Sequence[bytes], replica: str) -> None:
        for digest in digests:
            self._owners[digest] = replica
            self._owners.move_to_end(digest)
        while len(self._owners) > _MAX_PREFIXES:
            self._owners.popitem(last=False)
