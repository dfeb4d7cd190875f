"""Files that a user names: read whole or refused in a line, whatever is behind the name."""

import os
from pathlib import Path

import pytest

from configs.errors import InputError
from inference.batches import lines, records
from inference.files import json_lines, key_file, user_files

_READERS = {
    "a text": lambda name: user_files.read_text(name, 1 << 12),
    "requests": lambda name: list(json_lines.read(name, ("prompt",), (), "a prompt")),
    "a batch": lines.read,
    "keys": lambda name: key_file.read("--api_key_file", name),
    "results": lambda name: records.read(Path(name)),
}


@pytest.mark.parametrize("reader", _READERS)
def test_what_is_no_file_is_named(reader, tmp_path):
    os.mkfifo(tmp_path / "pipe")  # which nothing writes to
    names = {
        "/dev/zero": "is a device",
        str(tmp_path): "is a directory",
        str(tmp_path / "pipe"): "",
    }
    if reader != "results":  # of which there may be none yet
        names |= {str(tmp_path / "missing"): "No such file", "a\0b": "null"}
    for name, why in names.items():
        if name.endswith("pipe") and reader in ("a text", "results"):
            assert not _READERS[reader](name)
            continue
        with pytest.raises(InputError) as caught:
            _READERS[reader](name)
        assert why in str(caught.value) and "\n" not in str(caught.value)


def test_a_pipe_is_read_to_its_end():
    reading, writing = os.pipe()
    os.write(writing, b"text")
    os.close(writing)
    assert user_files.read_text(f"/dev/fd/{reading}", 9) == "text"
    os.close(reading)


def test_no_more_is_read_than_allowed(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    assert user_files.read(str(path), 5) == b"12345"
    with pytest.raises(InputError, match="at most 4 bytes are read"):
        user_files.read(str(path), 4)
