"""Windows with gaps: what becomes of their text, and that a prompt of a gap is like them."""

import numpy as np
import pytest

from configs.errors import InputError
from inference.checkpoints import tokenizer_files
from inference.training import bpe
from inference.training.gap_windows import GapWindows
from inference.training.windows import Windows

TEXT = "def add(first, second):\n    return first + second  # grüße 🙂\n" * 40
WINDOW, BATCH = 64, 8


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RIDGELINE_CACHE", str(tmp_path_factory.mktemp("cache")))
        folder = bpe.directory([TEXT], 300, bpe.FIM_MARKS)
    return tokenizer_files.load_tokenizer(folder, 300)


def windows(words, text=TEXT):
    tokens = np.asarray([*words.encode(text), words.eos_id] * 3, np.uint16)
    return Windows(tokens, WINDOW, BATCH, seed=1)


def rows(data, num_steps=20):
    return [row.tolist() for step in range(num_steps) for row in data.batch(step)["tokens"]]


def parts(words, row):
    """(prefix, middle, suffix) of a row with a gap, as text, and whether the suffix is first."""
    marks, text = words.infill.layout.marks, words.decode
    start, suffix, middle = (row.index(marks[letter]) for letter in "PSM")
    end = row.index(words.eos_id, middle)
    if suffix == start + 1:  # the prefix and the middle are one text
        return text(row[suffix + 1 : middle]), text(row[middle + 1 : end]), True
    before, after = text(row[start + 1 : suffix]), text(row[suffix + 1 : middle])
    return after, before + text(row[middle + 1 : end]), False


def test_the_parts_of_a_window_are_all_there(words):
    """But for ends of the texts, for which the marks leave no room."""
    plain, gaps = windows(words), GapWindows(windows(words), words, 1.0, seed=2)
    first, shares = 0, []
    for before, row in zip(rows(plain), rows(gaps), strict=True):
        assert len(row) == WINDOW + 1
        if words.infill.layout.marks["M"] not in row:
            assert row == before  # a middle that leaves no room
            continue
        suffix, rest, is_suffix_first = parts(words, row)
        first += is_suffix_first
        whole = words.decode(before)
        assert rest + suffix in whole
        shares.append(len(rest + suffix) / len(whole))
    assert np.median(shares) > 0.85
    assert 0.3 < first / (20 * BATCH) < 0.7


def test_a_prompt_of_a_gap_is_the_beginning_of_such_a_window(words):
    marks, num_alike = words.infill.layout.marks, 0
    for row in rows(GapWindows(windows(words), words, 1.0, seed=2)):
        if marks["M"] in row and row.index(marks["S"]) > 1:  # the prefix is first
            start, suffix, middle = (row.index(marks[letter]) for letter in "PSM")
            texts = words.decode(row[start + 1 : suffix]), words.decode(row[suffix + 1 : middle])
            num_alike += row[: middle + 1] == words.encode_infill(*texts)
    assert num_alike > 40


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_the_share_of_windows_with_a_gap(words, rate):
    data = GapWindows(windows(words), words, rate, seed=3)
    mark = words.infill.layout.marks["M"]
    share = np.mean([mark in row for row in rows(data)])
    assert abs(share - rate) < 0.12
    assert rows(data) == rows(data)  # a function of the step


def test_documents_stay_apart(words):
    """The longest one of a window has the gap; the others are as they were."""
    data = GapWindows(windows(words, "a = 1\n" * 5), words, 1.0, seed=3)
    middle = words.infill.layout.marks["M"]
    for before, row in zip(rows(windows(words, "a = 1\n" * 5)), rows(data), strict=True):
        start, stop = data._longest_document(np.asarray(before))
        assert row[:start] == before[:start]
        assert middle not in row or start <= row.index(middle) < stop


def test_a_tokenizer_without_marks(words):
    class Plain:
        infill = None

    with pytest.raises(InputError, match="training.fim_rate=0.5: the tokenizer has no fill-in"):
        GapWindows(windows(words), Plain(), 0.5, seed=1)
