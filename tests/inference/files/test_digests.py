"""Files that hold their own digest: any changed bit is found."""

import os
import random
import types

import pytest

from configs.errors import InputError
from inference.files import atomic, digests, ownership


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize("size", [0, 100, digests._PIECE + 5])
def test_every_bit_counts(tmp_path, size):
    with atomic.open_file(tmp_path / "x", is_kept=True) as file:
        file.write(b'{"%b": "%b"}' % (digests.FIELD.encode(), digests.EMPTY.encode()))
        file.write(random.Random(1).randbytes(size))
        digests.seal(file)
    data = (tmp_path / "x").read_bytes()
    digests.check(memoryview(data), "x")
    bits = random.Random(2).sample(range(8 * len(data)), 10 if size > 1000 else 400)
    for bit in bits:
        with pytest.raises(InputError, match="x: not what was written"):
            digests.check(memoryview(flipped(data, bit)), "x")
    for other in (data[:-1], data + b"\0", b""):
        with pytest.raises(InputError):
            digests.check(memoryview(other), "x")


def test_texts():
    data = digests.sealed('{"a": "ü"}\n')
    assert digests.opened(data, "x") == '{"a": "ü"}\n'
    for bit in range(8 * len(data)):
        with pytest.raises(InputError):
            digests.opened(flipped(data, bit), "x")


def test_who_may_write(tmp_path, monkeypatch):
    path = tmp_path / "kept" / "x"
    before = os.umask(0o002)  # of groups of one user
    try:
        with atomic.open_file(path, is_kept=True) as file:
            file.write(b"x")
    finally:
        os.umask(before)
    ownership.check(path)
    for place in (path, path.parent):
        mode = place.stat().st_mode
        place.chmod(mode | 0o020)
        with pytest.raises(InputError, match=f"written by other users: chmod go-w {place}$"):
            ownership.check(path)
        place.chmod(mode)
    tmp_path.chmod(0o775)  # as the umask leaves the cache, in which that of executables lies
    ownership.check(path.parent)
    other = types.SimpleNamespace(getuid=lambda: path.stat().st_uid + 1)
    monkeypatch.setattr(ownership, "os", other)
    if path.stat().st_uid:
        with pytest.raises(InputError, match="is another user's"):
            ownership.check(path)
