"""Results that are kept until all are there, whatever ends the process."""

import json
import os

import pytest

from configs.errors import InputError
from inference.files.resumable_results import ResumableResults

IDENTITY = {"configuration": "c", "weights": "w"}
KEYS = ("three", "zero", "seven", "nine")


def open_results(folder, overwrite=False, wanted=KEYS):
    return ResumableResults(folder / "out", IDENTITY, wanted, overwrite)


def test_a_line_that_was_cut_off_anywhere_is_computed_again(tmp_path):
    kept = open_results(tmp_path)
    for key in KEYS[:3]:
        kept.add(key, {"text": f"ünï {key}\u2028"})
    kept.close(False)
    whole = kept.path.read_bytes()
    lines = whole.count(b"\n")
    for size in range(len(whole) + 1):
        kept.path.write_bytes(whole[:size])
        again = open_results(tmp_path)
        complete = whole[:size].count(b"\n")
        assert tuple(again.results) == KEYS[: max(0, complete - 1)]
        again.add("nine", {"text": "more"})
        again.close(False)
        last = kept.path.read_bytes().split(b"\n")
        added = json.loads(last[-2])
        assert (added["key"], added["result"]) == ("nine", {"text": "more"}) and not last[-1]
    assert complete == lines == 4


def test_alternatives_by_token_id_are_read_back(tmp_path):
    kept = open_results(tmp_path)
    kept.add("zero", {"top_logprobs": [{9: -0.5, 10: -1.0, 2: -2.0}]})
    kept.close(False)
    again = open_results(tmp_path)
    assert again.results == {"zero": {"top_logprobs": [{"9": -0.5, "10": -1.0, "2": -2.0}]}}
    again.close(True)


def test_two_runs_do_not_write_one_file(tmp_path):
    first = open_results(tmp_path)
    with pytest.raises(InputError, match="another run is writing"):
        open_results(tmp_path, overwrite=True)
    first.close(True)
    assert not first.path.exists()
    open_results(tmp_path).close(False)
    assert not first.path.exists()


@pytest.mark.parametrize("damage", [b"{\n", b"[]\n", b'"x"\n', b"\xff\n", b'{"key": "x"}\n'])
def test_damage_is_named(tmp_path, damage):
    kept = open_results(tmp_path)
    kept.add("zero", {})
    kept.close(False)
    for data in (damage, kept.path.read_bytes() + damage):
        kept.path.write_bytes(data)
        with pytest.raises(InputError, match=r"--overwrite to start over") as caught:
            open_results(tmp_path)
        assert "\n" not in str(caught.value)
    open_results(tmp_path, overwrite=True).close(False)


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    kept = open_results(tmp_path)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(InputError, match=r"cannot write .*partial: No space left"):
        kept.add("zero", {})
