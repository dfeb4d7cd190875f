"""Instructions that a program can check (IFEval, Zhou et al. 2023, arXiv 2311.07911)."""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from configs.errors import InputError, shown

Check = Callable[[str], bool]

UNCHECKED = frozenset({"language:response_language"})  # no library here tells languages

_RELATIONS = ("at least", "less than")
_SENTENCE = re.compile(r"[^.!?\s][^.!?]*(?:[.!?]+[\"')\]]*(?=\s|$)|$|[.!?])")
# Blanks exclude newlines, and an open bracket without its end is one match, so that a search takes
# time linear in the text.
_STAR = re.compile(r"^[^\S\n]*\*[^*].*$", re.MULTILINE)
_DASH = re.compile(r"^[^\S\n]*-.*$", re.MULTILINE)
_PLACEHOLDER = re.compile(r"\[[^\]\n]*(\]?)")
_CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_FENCES = ("```json", "```Json", "```JSON", "```")


def read(prompt: str, ids: Sequence[str], kwargs: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Returns a check an instruction.

    Raises:
        InputError: an instruction is unknown, or lacks what it is about.
    """
    if not ids or len(ids) != len(kwargs):
        raise InputError("instruction_id_list and kwargs have one entry an instruction, at least 1")
    all_checks = []
    for id, values in zip(ids, kwargs, strict=True):
        if id not in _INSTRUCTIONS:
            valid = ", ".join(_INSTRUCTIONS)
            raise InputError(f"instruction {shown(id)} is not checked here; valid are {valid}")
        words = {name: value for name, value in values.items() if value is not None}
        if id == "combination:repeat_prompt":
            words.setdefault("prompt_to_repeat", prompt)
        try:
            for pattern in _patterns(words):
                re.compile(pattern)
            check = _INSTRUCTIONS[id](words)
            check("a")
        except (KeyError, TypeError, ValueError, AttributeError, re.error) as error:
            raise InputError(f"kwargs of {id}: {_why(error)}") from None
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


def _patterns(words: Mapping[str, Any]) -> list[str]:
    """What is looked for as regular expressions."""
    listed = [*words.get("keywords", ()), *words.get("forbidden_words", ())]
    return listed + [words[name] for name in ("keyword", "section_spliter") if name in words]


def _why(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def _compared(count: int, relation: str, limit: int) -> bool:
    if relation not in _RELATIONS:
        raise ValueError(f"a relation is one of {', '.join(_RELATIONS)}, not {shown(relation)}")
    return count >= limit if relation == "at least" else count < limit


def _found(pattern: str, text: str, flags: re.RegexFlag = re.IGNORECASE) -> int:
    return len(re.findall(pattern, text, flags))


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


def _first_word(text: str, paragraphs: int, nth: int, word: str) -> bool:
    parts = text.split("\n\n")
    count = sum(bool(part.strip()) for part in parts)
    if count != paragraphs or not 0 < nth <= count or not parts[nth - 1].strip():
        return False
    first = parts[nth - 1].split()[0].lstrip("'").lstrip('"')
    return re.split(r"[.,?!'\"]", first)[0].lower() == word.lower()


def _postscript(text: str, marker: str) -> bool:
    patterns = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return _found(patterns.get(marker, marker.lower()), text.lower()) > 0


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


# By id: the check that an instruction's words make. Sentences and words in capitals are counted by
# a rule of our own, where the paper's program has nltk's.
_INSTRUCTIONS: dict[str, Callable[[Mapping[str, Any]], Check]] = {
    "keywords:existence": lambda w: lambda text: all(_found(k, text) for k in w["keywords"]),
    "keywords:frequency": lambda w: (
        lambda text: _compared(_found(w["keyword"], text), w["relation"], w["frequency"])
    ),
    "keywords:forbidden_words": lambda w: (
        lambda text: not any(_found(rf"\b{word}\b", text) for word in w["forbidden_words"])
    ),
    "keywords:letter_frequency": lambda w: (
        lambda text: _compared(_letter(text, w["letter"]), w["let_relation"], w["let_frequency"])
    ),
    "length_constraints:number_sentences": lambda w: (
        lambda text: _compared(len(_SENTENCE.findall(text)), w["relation"], w["num_sentences"])
    ),
    "length_constraints:number_paragraphs": lambda w: (
        lambda text: _has_paragraphs(text, w["num_paragraphs"])
    ),
    "length_constraints:number_words": lambda w: (
        lambda text: _compared(_found(r"\w+", text), w["relation"], w["num_words"])
    ),
    "length_constraints:nth_paragraph_first_word": lambda w: (
        lambda text: _first_word(text, w["num_paragraphs"], w["nth_paragraph"], w["first_word"])
    ),
    "detectable_content:number_placeholders": lambda w: (
        lambda text: _num_placeholders(text) >= w["num_placeholders"]
    ),
    "detectable_content:postscript": lambda w: (
        lambda text: _postscript(text, w["postscript_marker"])
    ),
    "detectable_format:number_bullet_lists": lambda w: (
        lambda text: _num_bullets(text) == w["num_bullets"]
    ),
    "detectable_format:constrained_response": lambda w: (
        lambda text: any(answer in text for answer in _CONSTRAINED)
    ),
    "detectable_format:number_highlighted_sections": lambda w: (
        lambda text: _num_highlights(text) >= w["num_highlights"]
    ),
    "detectable_format:multiple_sections": lambda w: (
        lambda text: (
            _found(rf"\s?{w['section_spliter']}\s?\d+\s?", text, re.RegexFlag(0))
            >= w["num_sections"]
        )
    ),
    "detectable_format:json_format": lambda w: _is_json,
    "detectable_format:title": lambda w: _has_title,
    "combination:two_responses": lambda w: _two_responses,
    "combination:repeat_prompt": lambda w: (
        lambda text: text.strip().lower().startswith(w["prompt_to_repeat"].strip().lower())
    ),
    "startend:end_checker": lambda w: (
        lambda text: text.strip().strip('"').lower().endswith(w["end_phrase"].strip().lower())
    ),
    "startend:quotation": lambda w: _is_quoted,
    "change_case:capital_word_frequency": lambda w: (
        lambda text: _compared(_num_capitals(text), w["capital_relation"], w["capital_frequency"])
    ),
    "change_case:english_capital": lambda w: str.isupper,
    "change_case:english_lowercase": lambda w: str.islower,
    "punctuation:no_comma": lambda w: lambda text: "," not in text,
}
