"""Instructions that a program can check (IFEval, Zhou et al. 2023, arXiv 2311.07911)."""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Annotated, Any, Literal

import msgspec

from configs.errors import InputError, reason, shown

Check = Callable[[str], bool]

UNCHECKED = frozenset({"language:response_language"})  # no library here tells languages

_Relation = Literal["at least", "less than"]
_Character = Annotated[str, msgspec.Meta(min_length=1, max_length=1)]
_VALID = {
    int: "a whole number",
    str: "a text",
    list[str]: "a list of texts",
    _Relation: "'at least' or 'less than'",
    _Character: "one character",
}
_KWARGS: dict[str, Any] = {  # a type of `_VALID` by the name of a keyword argument
    "capital_frequency": int,
    "capital_relation": _Relation,
    "end_phrase": str,
    "first_word": str,
    "forbidden_words": list[str],
    "frequency": int,
    "keyword": str,
    "keywords": list[str],
    "let_frequency": int,
    "let_relation": _Relation,
    "letter": _Character,
    "nth_paragraph": int,
    "num_bullets": int,
    "num_highlights": int,
    "num_paragraphs": int,
    "num_placeholders": int,
    "num_sections": int,
    "num_sentences": int,
    "num_words": int,
    "postscript_marker": str,
    "prompt_to_repeat": str,
    "relation": _Relation,
    "section_spliter": str,
}
_SENTENCE = re.compile(r"[^.!?\s][^.!?]*(?:[.!?]+[\"')\]]*(?=\s|$)|$|[.!?])")
# Blanks exclude newlines, and an open bracket without its end is one match, so that a search takes
# time linear in the text.
_STAR = re.compile(r"^[^\S\n]*\*[^*].*$", re.MULTILINE)
_DASH = re.compile(r"^[^\S\n]*-.*$", re.MULTILINE)
_PLACEHOLDER = re.compile(r"\[[^\]\n]*(\]?)")
_CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_FENCES = ("```json", "```Json", "```JSON", "```")


def read(prompt: str, ids: Sequence[str], kwargs: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Returns a check for each instruction.

    Args:
        kwargs: keyword arguments of each instruction; those that it does not take, or that are
            None, are ignored.

    Raises:
        InputError: an instruction is unknown, or lacks a keyword argument, or one is invalid.
    """
    if not ids or len(ids) != len(kwargs):
        raise InputError("instruction_id_list and kwargs have one entry an instruction, at least 1")
    all_checks = []
    for id, values in zip(ids, kwargs, strict=True):
        if id not in _INSTRUCTIONS:
            valid = ", ".join(_INSTRUCTIONS)
            raise InputError(f"instruction {shown(id)} is not checked here; valid are {valid}")
        values = {name: value for name, value in values.items() if value is not None}
        if id == "combination:repeat_prompt":
            values.setdefault("prompt_to_repeat", prompt)
        make = _INSTRUCTIONS[id]
        try:
            check = make(**{name: _kwarg(values, name) for name in signature(make).parameters})
        except InputError as error:
            raise InputError(f"kwargs of {id}: {error}") from None
        all_checks.append(check)
    return all_checks


def judge(checks: Sequence[Check], answer: str) -> dict[str, list[bool]]:
    """Which instructions an answer follows: as it is, and loosely, where emphasis, a first or a
    last line does not count.
    """
    lines = answer.split("\n")
    parts = ("\n".join(part).strip() for part in (lines, lines[1:], lines[:-1], lines[1:-1]))
    texts = [answer, *list(parts)[1:]]
    texts += [text.replace("*", "") for text in texts]
    strict = [bool(answer.strip()) and check(answer) for check in checks]
    loose = [any(text.strip() and check(text) for text in texts) for check in checks]
    return {
        "prompt_level_strict_acc": [all(strict)],
        "inst_level_strict_acc": strict,
        "prompt_level_loose_acc": [all(loose)],
        "inst_level_loose_acc": loose,
    }


def _kwarg(values: Mapping[str, Any], name: str) -> Any:
    valid = _VALID[_KWARGS[name]]
    if name not in values:
        raise InputError(f"{name} is missing; valid is {valid}")
    try:
        return msgspec.convert(values[name], _KWARGS[name])
    except msgspec.ValidationError:
        raise InputError(f"{name}={shown(values[name])}: valid is {valid}") from None


def _compiled(name: str, pattern: str, flags: re.RegexFlag = re.IGNORECASE) -> re.Pattern[str]:
    """A pattern made of the keyword argument `name`."""
    try:
        return re.compile(pattern, flags)
    except (re.error, OverflowError, RecursionError) as error:
        raise InputError(
            f"{name}: {reason(error)} in {shown(pattern)}; valid is a regular expression"
        ) from None


def _compared(count: int, relation: str, limit: int) -> bool:
    return count >= limit if relation == "at least" else count < limit


def _letter(text: str, letter: str) -> int:
    return Counter(text.lower())[letter.lower()]


def _between(text: str, divider: str) -> list[str] | None:
    """The parts of a text, without empty ones at its ends; None: another one is empty."""
    parts = re.split(divider, text)
    inner = [part.strip() for part in parts]
    if len(inner) > 1 and not inner[-1]:
        inner.pop()
    if inner and not inner[0]:
        inner.pop(0)
    return inner if all(inner) else None


def _has_paragraphs(text: str, count: int) -> bool:
    parts = _between(text, r"\s?\*\*\*\s?")
    return parts is not None and len(parts) == count


def _two_responses(text: str) -> bool:
    parts = _between(text, re.escape("******"))
    return parts is not None and len(parts) == 2 and parts[0] != parts[1]


def _has_first_word(num_paragraphs: int, nth_paragraph: int, first_word: str) -> Check:
    def check(text: str) -> bool:
        parts = text.split("\n\n")
        count = sum(bool(part.strip()) for part in parts)
        if count != num_paragraphs or not 0 < nth_paragraph <= count:
            return False
        words = parts[nth_paragraph - 1].split()
        if not words:
            return False
        first = words[0].lstrip("'").lstrip('"')
        return re.split(r"[.,?!'\"]", first)[0].lower() == first_word.lower()

    return check


def _all_found(keywords: Sequence[str]) -> Check:
    patterns = [_compiled("keywords", keyword) for keyword in keywords]
    return lambda text: all(pattern.search(text) for pattern in patterns)


def _none_found(forbidden_words: Sequence[str]) -> Check:
    patterns = [_compiled("forbidden_words", rf"\b{word}\b") for word in forbidden_words]
    return lambda text: not any(pattern.search(text) for pattern in patterns)


def _has_keyword(keyword: str, relation: str, frequency: int) -> Check:
    pattern = _compiled("keyword", keyword)
    return lambda text: _compared(len(pattern.findall(text)), relation, frequency)


def _has_sections(section_spliter: str, num_sections: int) -> Check:
    pattern = _compiled("section_spliter", rf"\s?{section_spliter}\s?\d+\s?", re.RegexFlag.NOFLAG)
    return lambda text: len(pattern.findall(text)) >= num_sections


def _has_postscript(postscript_marker: str) -> Check:
    patterns = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    pattern = patterns.get(postscript_marker, postscript_marker.lower())
    compiled = _compiled("postscript_marker", pattern)
    return lambda text: compiled.search(text.lower()) is not None


def _num_bullets(text: str) -> int:
    return len(_STAR.findall(text)) + len(_DASH.findall(text))


def _num_placeholders(text: str) -> int:
    return sum(bracket == "]" for bracket in _PLACEHOLDER.findall(text))


def _num_highlights(text: str) -> int:
    single = re.findall(r"\*[^\n\*]*\*", text)
    double = re.findall(r"\*\*[^\n\*]*\*\*", text)
    return sum(bool(part.strip("*").strip()) for part in (*single, *double))


def _is_json(text: str) -> bool:
    bare = text.strip()
    for fence in _FENCES:
        bare = bare.removeprefix(fence)
    try:
        json.loads(bare.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _has_title(text: str) -> bool:
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end and line[start : end + 2].lstrip("<").rstrip(">").strip():
            return True
    return False


def _is_quoted(text: str) -> bool:
    bare = text.strip()
    return len(bare) > 1 and bare[0] == bare[-1] == '"'


def _num_capitals(text: str) -> int:
    return sum(word.isupper() for word in re.findall(r"\w+(?:['-]\w+)*", text))


# By id: what makes a check of the keyword arguments that its parameters name. Sentences and words
# in capitals are counted by a rule of our own, where the paper's program has nltk's.
_INSTRUCTIONS: dict[str, Callable[..., Check]] = {
    "keywords:existence": _all_found,
    "keywords:frequency": _has_keyword,
    "keywords:forbidden_words": _none_found,
    "keywords:letter_frequency": lambda letter, let_relation, let_frequency: (
        lambda text: _compared(_letter(text, letter), let_relation, let_frequency)
    ),
    "length_constraints:number_sentences": lambda relation, num_sentences: (
        lambda text: _compared(len(_SENTENCE.findall(text)), relation, num_sentences)
    ),
    "length_constraints:number_paragraphs": lambda num_paragraphs: (
        lambda text: _has_paragraphs(text, num_paragraphs)
    ),
    "length_constraints:number_words": lambda relation, num_words: (
        lambda text: _compared(len(re.findall(r"\w+", text)), relation, num_words)
    ),
    "length_constraints:nth_paragraph_first_word": _has_first_word,
    "detectable_content:number_placeholders": lambda num_placeholders: (
        lambda text: _num_placeholders(text) >= num_placeholders
    ),
    "detectable_content:postscript": _has_postscript,
    "detectable_format:number_bullet_lists": lambda num_bullets: (
        lambda text: _num_bullets(text) == num_bullets
    ),
    "detectable_format:constrained_response": lambda: (
        lambda text: any(answer in text for answer in _CONSTRAINED)
    ),
    "detectable_format:number_highlighted_sections": lambda num_highlights: (
        lambda text: _num_highlights(text) >= num_highlights
    ),
    "detectable_format:multiple_sections": _has_sections,
    "detectable_format:json_format": lambda: _is_json,
    "detectable_format:title": lambda: _has_title,
    "combination:two_responses": lambda: _two_responses,
    "combination:repeat_prompt": lambda prompt_to_repeat: (
        lambda text: text.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "startend:end_checker": lambda end_phrase: (
        lambda text: text.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": lambda: _is_quoted,
    "change_case:capital_word_frequency": lambda capital_relation, capital_frequency: (
        lambda text: _compared(_num_capitals(text), capital_relation, capital_frequency)
    ),
    "change_case:english_capital": lambda: str.isupper,
    "change_case:english_lowercase": lambda: str.islower,
    "punctuation:no_comma": lambda: lambda text: "," not in text,
}
