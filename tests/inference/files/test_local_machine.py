"""Measurements of this machine: one process at a time takes them."""

import fcntl
import os

import pytest

from inference.files import local_machine


def test_one_process_measures_at_a_time(monkeypatch, tmp_path):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    with local_machine.alone():
        folder = os.open(local_machine.path("products").parent, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(folder)


def test_where_nothing_can_be_locked_nobody_waits(monkeypatch, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    with local_machine.alone(), local_machine.alone():
        assert local_machine.read("products") is None
