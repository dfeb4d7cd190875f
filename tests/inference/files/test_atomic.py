"""Files that are complete or not there."""

import os

import pytest

from inference.files import atomic


def test_nothing_is_left_behind_when_interrupted(tmp_path):
    path = tmp_path / "x"
    path.write_text("before")
    with pytest.raises(KeyboardInterrupt), atomic.open_file(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_two_writers_do_not_meet(tmp_path):
    path = tmp_path / "new" / ("x" * 250)  # as long as a name may be, nearly
    with atomic.open_file(path) as first, atomic.open_file(path) as second:
        first.write(b"first")
        second.write(b"second")
    assert path.read_bytes() == b"first" and list(path.parent.iterdir()) == [path]


def test_a_file_is_as_readable_as_any_other(tmp_path):
    before = os.umask(0o027)
    try:
        with atomic.open_file(tmp_path / "x"):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640
