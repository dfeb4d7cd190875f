"""A file's bytes by ranges: mapped, and of an object as a store would send them."""

import os
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import InputError
from inference.checkpoints import mapped
from inference.files import contents, mirror, object_store, range_cache, user_files
from inference.files.object_store import StoredObject

ROWS, ROW_BYTES = 5, 3 * contents.MAX_GAP_BYTES
DATA = np.random.default_rng(0).bytes(ROWS * ROW_BYTES)
ITEM = StoredObject("s3://bucket", "model.safetensors", len(DATA), "v1")


@pytest.fixture(autouse=True)
def requests(tmp_path, monkeypatch):
    """The ranges that a store was asked for, by a process that starts with an empty cache."""
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    ranges = []

    def read(item, start, stop):
        ranges.append((start, stop))
        return memoryview(DATA)[start:stop]

    monkeypatch.setattr(object_store, "read", read)
    start_anew(monkeypatch)
    yield ranges
    range_cache.bound.cache_clear()


def start_anew(monkeypatch):
    range_cache.bound.cache_clear()
    monkeypatch.setattr(range_cache, "_room", range_cache._Room())


def size_of_pieces():
    folder = range_cache.folder()
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@given(st.integers(0, len(DATA)), st.integers(0, len(DATA)))
def test_a_range_is_that_of_the_file(start, stop):
    start, stop = sorted((start, stop))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RIDGELINE_STORE_GB", "0")
        range_cache.bound.cache_clear()
        assert bytes(contents.Ranged(ITEM).read(start, stop)) == DATA[start:stop]


@pytest.mark.parametrize("columns", [
    slice(0, ROW_BYTES // 2), slice(ROW_BYTES // 2, ROW_BYTES), slice(100, 200),
    slice(10, ROW_BYTES - 10), slice(None),
])  # fmt: skip
def test_columns_are_those_of_the_file(columns, tmp_path, requests):
    path = tmp_path / "file"
    path.write_bytes(DATA)
    with mapped.map_file(path) as file:
        expected = file.cut(ROW_BYTES, 3, ROW_BYTES, columns)
        for _ in range(2):  # read, and kept
            actual = contents.Ranged(ITEM).cut(ROW_BYTES, 3, ROW_BYTES, columns)
            np.testing.assert_array_equal(actual, expected)
        wanted = expected.size
        del expected
    num_bytes = sum(stop - start for start, stop in requests)
    is_small = ROW_BYTES - wanted // 3 <= contents.MAX_GAP_BYTES
    assert num_bytes == (3 * ROW_BYTES if is_small else wanted)


def test_what_is_kept_is_not_asked_for_again(requests):
    first = bytes(contents.Ranged(ITEM).read(3, 1000))
    assert bytes(contents.Ranged(ITEM).read(3, 1000)) == first == DATA[3:1000]
    assert requests == [(3, 1000)]
    changed = ITEM._replace(etag="v2")
    contents.Ranged(changed).read(3, 1000)
    assert len(requests) == 2


def test_what_is_damaged_is_asked_for_again(requests):
    contents.Ranged(ITEM).read(3, 1000)
    piece = next(range_cache.folder().rglob("3-1000"))
    piece.write_bytes(b"x" + piece.read_bytes()[1:])
    assert bytes(contents.Ranged(ITEM).read(3, 1000)) == DATA[3:1000]
    assert len(requests) == 2


def test_the_least_recently_used_goes_first(monkeypatch):
    monkeypatch.setenv("RIDGELINE_STORE_GB", "3.5e-6")
    start_anew(monkeypatch)
    for start in (0, 1000, 2000):
        contents.Ranged(ITEM).read(start, start + 1000)
    past = time.time() - 1000
    for age, start in enumerate((1000, 0, 2000)):
        piece = next(range_cache.folder().rglob(f"{start}-{start + 1000}"))
        os.utime(piece, (past + age, past + age))
    start_anew(monkeypatch)
    contents.Ranged(ITEM).read(3000, 4000)
    pieces = {path.name for path in range_cache.folder().rglob("*-*")}
    assert pieces == {"0-1000", "2000-3000", "3000-4000"}


def test_a_process_does_not_push_out_what_it_reads(monkeypatch, requests):
    monkeypatch.setenv("RIDGELINE_STORE_GB", "3.5e-6")
    start_anew(monkeypatch)
    for _ in range(2):
        for start in range(0, 6000, 1000):
            contents.Ranged(ITEM).read(start, start + 1000)
        assert size_of_pieces() <= 3500
    assert len(requests) == 6 + 3


@pytest.mark.parametrize("value", ["-1", "much", "inf", "nan"])
def test_a_bound_that_is_none_is_named(value, monkeypatch):
    monkeypatch.setenv("RIDGELINE_STORE_GB", value)
    start_anew(monkeypatch)
    with pytest.raises(InputError, match=f"RIDGELINE_STORE_GB='{value}' is not how many GB"):
        range_cache.bound()


def test_only_files_of_ours_stand_for_objects(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(contents.pointer(ITEM))
    assert contents.stored_object(path) is None
    assert mapped.map_file(path).is_local
    path = range_cache.mirrors() / "m" / "model.safetensors"
    path.parent.mkdir(parents=True)
    path.write_bytes(contents.pointer(ITEM))
    assert contents.stored_object(path) == ITEM
    assert not mapped.map_file(path).is_local and contents.size(path) == len(DATA)


@pytest.mark.parametrize("url", [
    "s3://", "s3://bucket", "s3://Bucket/x", "gs://bucket/../x", "s3://bucket/a//b", "s3://b/x",
    "s3://user:secret@bucket/x", "gs://bucket/a\nb",
])  # fmt: skip
def test_a_url_that_names_no_object(url):
    with pytest.raises(InputError, match=r"valid: s3://BUCKET/PATH|printable bytes"):
        object_store.split(url)


@pytest.mark.parametrize("read", [mirror.of, lambda url: user_files.read(url, 10)])
def test_without_the_package_the_command_is_named(read, monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(InputError, match=r"pip install '.\[cloud\]'"):
        read("s3://bucket/model")
