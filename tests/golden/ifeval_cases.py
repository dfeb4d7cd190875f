"""Answers and what lm-eval's copy of IFEval's program says of them, in ifeval/cases.jsonl.

pip install 'lm-eval[ifeval]==0.4.13' && python tests/golden/ifeval_cases.py
"""

import json
import random
from pathlib import Path

import nltk

nltk.download = lambda *args, **kwargs: True  # its data serve instructions that are not among these
from lm_eval.tasks.ifeval import utils  # noqa: E402

EACH = 8  # cases of an instruction and a verdict
TRIES = 20_000
PROMPT = "hello"
WORDS = [
    "hello", "World", "ALPHA", "beta,", "[name]", "*bold*", "**very bold**", "** **", "***",
    "******", "<<Title>>", "<<>>", "P.S. x", "P.P.S y", "p. s. z", "SECTION 1", "Section 2",
    "SECTION 12", "- item", "* item", "\n", "\n\n", "\n* a", "\n- b", '"', "'", "é", "", " ", "x",
    "My answer is yes.", "end.", "Is there?", '{"a": 1}', "```json", "```", "any other",
]  # fmt: skip
draw = random.Random(1)


def relation() -> str:
    return draw.choice(["at least", "less than"])


def few() -> int:
    return draw.randint(1, 4)


def paragraph() -> dict:
    count = draw.randint(1, 3)
    word = draw.choice(["hello", "world", "alpha", "my"])
    return {"num_paragraphs": count, "nth_paragraph": draw.randint(1, count), "first_word": word}


KWARGS = {
    "keywords:existence": lambda: {"keywords": draw.sample(["hello", "world", "beta", "x"], 2)},
    "keywords:frequency": lambda: {
        "keyword": draw.choice(["hello", "a"]), "frequency": few(), "relation": relation()
    },
    "keywords:forbidden_words": lambda: {"forbidden_words": draw.sample(["hello", "bet", "x"], 2)},
    "keywords:letter_frequency": lambda: {
        "letter": draw.choice("abeLo"), "let_frequency": few(), "let_relation": relation()
    },
    "length_constraints:number_paragraphs": lambda: {"num_paragraphs": few()},
    "length_constraints:number_words": lambda: {
        "relation": relation(), "num_words": draw.randint(1, 20)
    },
    "length_constraints:nth_paragraph_first_word": paragraph,
    "detectable_content:number_placeholders": lambda: {"num_placeholders": few()},
    "detectable_content:postscript": lambda: {
        "postscript_marker": draw.choice(["P.S.", "P.P.S"])
    },
    "detectable_format:number_bullet_lists": lambda: {"num_bullets": few()},
    "detectable_format:constrained_response": dict,
    "detectable_format:number_highlighted_sections": lambda: {"num_highlights": few()},
    "detectable_format:multiple_sections": lambda: {
        "section_spliter": draw.choice(["SECTION", "Section"]), "num_sections": draw.randint(1, 2)
    },
    "detectable_format:json_format": dict,
    "detectable_format:title": dict,
    "combination:two_responses": dict,
    "combination:repeat_prompt": lambda: {"prompt_to_repeat": PROMPT},
    "startend:end_checker": lambda: {"end_phrase": draw.choice(["any other", "x", "end."])},
    "startend:quotation": dict,
    "punctuation:no_comma": dict,
}  # fmt: skip


def answer(id: str) -> str:
    if id.endswith("first_word") and draw.random() < 0.7:
        firsts = ["Hello, you", "'World' a", "ALPHA b", "my", ""]
        return "\n\n".join(draw.choice(firsts) for _ in range(draw.randint(1, 3)))
    count = draw.choice([1, 2, 4, 8, 16])
    text = draw.choice([" ", "", "\n"]).join(draw.choice(WORDS) for _ in range(count))
    forms = [text, text, text.lower(), text.upper(), f'"{text}"', '```json\n{"a": [1]}\n```']
    return draw.choice(forms)


def cases():
    for id, kwargs in KWARGS.items():
        counts: dict[tuple[bool, bool], int] = {}
        for _ in range(TRIES):
            given, text = kwargs(), answer(id)
            document = {
                "key": 1, "prompt": PROMPT, "instruction_id_list": [id], "kwargs": [given]
            }  # fmt: skip
            found = utils.process_results(document, [text])
            verdict = found["prompt_level_strict_acc"], found["prompt_level_loose_acc"]
            if counts.get(verdict, 0) < EACH and len(text) < 150 and text.strip():
                counts[verdict] = counts.get(verdict, 0) + 1
                yield {"id": id, "kwargs": given, "answer": text, "met": verdict}


if __name__ == "__main__":
    path = Path(__file__).parent / "ifeval" / "cases.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(case) + "\n" for case in cases()), "utf-8")
