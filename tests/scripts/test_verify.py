"""`python -m scripts.verify`: which files are damaged, and which carry no digest."""

import errno
import json
import os
import types
from pathlib import Path

import numpy as np
import pytest

from inference.checkpoints import convert, resolve
from inference.checkpoints.gguf.export import gguf_export
from inference.files.resumable_results import ResumableResults
from inference.training import token_file
from scripts import common, verify
from tests.scripts import apps


@pytest.fixture
def run(monkeypatch, capfd):
    guarded = common.run
    monkeypatch.setattr(common, "run", lambda main, unread: guarded(main, unread, takes_names=True))
    app = types.SimpleNamespace(main=verify.main, __name__="verify")
    return lambda *args: apps.call(app, monkeypatch, capfd, *map(str, args))


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A file of each kind, by what is damaged in it."""
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    token_file.cached("a", lambda: np.arange(99), 100)
    checkpoint = resolve.resolve(str(apps.TINY)).open(None)
    gguf_export.write(checkpoint, tmp_path / "tiny.gguf")
    convert.convert(checkpoint, tmp_path / "native", "orbax", None, 10**9, None)
    results = ResumableResults(tmp_path / "out", {}, ["a"], False)
    results.add("a", {"text": "b"})
    results.close(False)
    return tmp_path


def test_what_is_damaged_is_named(run, kept):
    (kept / "notes.txt").write_text("mine")
    earlier = kept / "cache" / "tokens" / "of-an-earlier-version.npy"
    np.save(earlier, np.arange(9))
    ran = run(kept)
    assert ran.status == 0
    assert ran.out == "".join(
        f"{path}: carries no digest\n" for path in (earlier, kept / "notes.txt")
    )
    assert "0 damaged, 2 without a digest" in ran.err
    earlier.unlink()
    config = kept / "native" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text())))
    damaged = [config, kept / "tiny.gguf", kept / "out.partial", *kept.rglob("cache/tokens/*")]
    for path in damaged[1:]:
        data = path.read_bytes()
        path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    ran = run(kept / "native", kept / "tiny.gguf", kept / "out.partial")
    assert ran.status == 1 and ran.out.count("damaged: ") == 3 and "3 damaged" in ran.err
    assert all(str(path) in ran.out for path in damaged[:3])
    entry = kept / "cache" / "compiled" / "jit_step-1-cache"
    entry.parent.mkdir()
    entry.write_bytes(b"no executable")
    ran = run()  # the cache
    assert ran.status == 1
    assert [line.partition(": not")[0] for line in ran.out.splitlines()] == [
        f"damaged: {entry}", f"damaged: {damaged[3]}",
    ]  # fmt: skip


def test_what_cannot_be_read_ends_nothing(run, kept, monkeypatch):
    os.mkfifo(kept / "a-pipe")  # nobody writes to it
    (kept / "b").touch()
    opened = Path.open

    def opens(path, *how, **more):
        if path.name == "b":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *how, **more)

    monkeypatch.setattr(Path, "open", opens)
    ran = run(kept)
    assert ran.status == 1 and "1 damaged, 1 without a digest" in ran.err
    assert ran.out.splitlines() == [
        f"{kept / 'a-pipe'}: carries no digest", f"damaged: Permission denied: {kept / 'b'}",
    ]  # fmt: skip


def test_what_is_not_there(run, tmp_path):
    assert "no such file or directory" in run(tmp_path / "missing").error
