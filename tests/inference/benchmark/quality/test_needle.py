"""Facts in long texts."""

import pytest

from scripts.reports.caches.needle import needles

_FILLER = "".join(f"{n} lines of hay,\n\nbelow them {n} more.\n" for n in range(100, 140))
_TOKENS, _START = 400, (1000, 1001)


def _encode(text):
    return list(text.encode())


def _text(needle):
    assert needle.prompt[:2] == _START
    return bytes(needle.prompt[2:]).decode()


@pytest.fixture(name="found")
def found_fixture():
    return needles(_FILLER, _encode, _TOKENS, count=5, start=_START)


def test_facts_stand_evenly_from_the_beginning_to_the_end(found):
    for nth, needle in enumerate(found):
        fact, question = f" is {needle.answer}.", " is"
        *lines, asked = _text(needle).splitlines()
        (at,) = (index for index, line in enumerate(lines) if line.endswith(fact))
        assert asked == lines[at].removesuffix(fact) + question
        assert at == round(nth / 4 * (len(lines) - 1))
        assert needle.share == nth / 4


def test_prompts_begin_as_the_filler_does(found):
    hay = [line for line in _FILLER.splitlines() if line]
    for needle in found:
        lines = [line for line in _text(needle).splitlines() if "magic" not in line]
        assert lines == hay[: len(lines)]
        assert _TOKENS - 30 < len(needle.prompt) <= _TOKENS


def test_no_text_tells_the_answer_of_another(found):
    texts = [_text(needle) for needle in found]
    for needle in found:
        assert sum(needle.answer in text for text in texts) == 1
        assert needle.is_found(f" {needle.answer}.\n") and not needle.is_found(" 4821.")


def test_the_seed_decides(found):
    assert needles(_FILLER, _encode, _TOKENS, 5, _START) == found
    assert needles(_FILLER, _encode, _TOKENS, 5, _START, seed=1) != found


def test_a_filler_that_is_too_short():
    with pytest.raises(ValueError, match="too short"):
        needles("a line\n", _encode, _TOKENS, 2)
