"""Documents of tasks, and judgements of their answers beside lm-eval's."""

import itertools
import json
import random
import re
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.errors import InputError
from inference.benchmark.quality.tasks import documents, instructions, scored
from inference.benchmark.quality.tasks.documents import Choice
from inference.checkpoints import tokenizer_files
from inference.outputs import Score

GOLDEN = Path(__file__).parents[3] / "golden"
CASES = GOLDEN / "ifeval" / "cases.jsonl"
TOKENIZER = GOLDEN / "llama-tokenizer"


@pytest.fixture
def read(tmp_path):
    def of(*lines: object):
        path = tmp_path / "task.jsonl"
        texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
        path.write_text("\n".join(texts))
        return documents.read(str(path))

    return of


def test_instructions_are_judged_as_lm_eval_does():
    cases = [json.loads(line) for line in CASES.read_text("utf-8").splitlines()]
    assert len({case["id"] for case in cases}) == 20
    for case in cases:
        checks = instructions.read("hello", [case["id"]], [case["kwargs"]])
        met = instructions.judge(checks, case["answer"])
        found = [met["prompt_level_strict_acc"][0], met["prompt_level_loose_acc"][0]]
        assert found == case["met"], case
        assert met["inst_level_strict_acc"] == found[:1]


@pytest.mark.parametrize(
    "id, kwargs, answer, is_met",
    [
        ("change_case:english_capital", {}, "LOUD, AND CLEAR.", True),
        ("change_case:english_capital", {}, "Loud", False),
        ("change_case:english_lowercase", {}, "quiet", True),
        ("change_case:capital_word_frequency",
         {"capital_relation": "at least", "capital_frequency": 2}, "GO to ROME-X now", True),
        ("change_case:capital_word_frequency",
         {"capital_relation": "less than", "capital_frequency": 2}, "GO to ROME now", False),
        ("length_constraints:number_sentences",
         {"relation": "at least", "num_sentences": 3}, 'One. "Two!" Three', True),
        ("length_constraints:number_sentences",
         {"relation": "less than", "num_sentences": 3}, "One. Two? Three!", False),
    ],
)  # fmt: skip
def test_instructions_that_are_counted_by_rules_of_our_own(id, kwargs, answer, is_met):
    (check,) = instructions.read("", [id], [kwargs])
    assert check(answer) is is_met


COUNTERS = {
    "bullets": instructions._num_bullets,
    "placeholders": instructions._num_placeholders,
    "title": instructions._has_title,
}


def test_searches_find_what_the_published_patterns_do():
    draw = random.Random(1)
    pieces = ["\n", "\n\n", " ", "\t", "\r", "\v", "-", "*", "a", "[", "]", "<", "<<", ">", ">>"]
    texts = ["".join(draw.choices(pieces, k=draw.randint(0, 12))) for _ in range(20_000)]
    texts += [json.loads(line)["answer"] for line in CASES.read_text("utf-8").splitlines()]
    for text in texts:
        stars = re.findall(r"^\s*\*[^\*].*$", text, re.MULTILINE)
        dashes = re.findall(r"^\s*-.*$", text, re.MULTILINE)
        titles = re.findall(r"<<[^\n]+>>", text)
        assert {name: count(text) for name, count in COUNTERS.items()} == {
            "bullets": len(stars) + len(dashes),
            "placeholders": len(re.findall(r"\[.*?\]", text)),
            "title": any(title.lstrip("<").rstrip(">").strip() for title in titles),
        }, text


@pytest.mark.parametrize(
    "name, text, count",
    [
        ("bullets", "\n" * 1_000_000 + "- a", 1),
        ("bullets", "\n" * 1_000_000 + "* a", 1),
        ("placeholders", "[" * 1_000_000 + "\n[a]", 1),
        ("title", "<" * 1_000_000 + "\n<<a>>", True),
    ],
)
def test_long_answers_are_searched_once(name, text, count):
    """A search of quadratic time would take hours."""
    assert COUNTERS[name](text) == count


@pytest.mark.parametrize("chat", [False, True])
def test_only_the_tokens_of_an_end_are_scored(chat):
    tokenizer = tokenizer_files.load_tokenizer(TOKENIZER, 320)
    document = Choice("Question: 2+2=\nAnswer:", (" yes", " four"), 1)
    prompts = scored.Prompts(tokenizer, chat)
    (outcome,) = scored.run(Scorer(), [document], prompts, None)
    for end, logprob in zip(document.choices, outcome.logprobs, strict=True):
        tokens, first = prompts.with_end(document.text, end)
        assert tokenizer.decode(tokens[first:]).strip() == end.strip()
        assert logprob == -sum(range(first, len(tokens)))


def test_an_end_without_a_token_of_its_own_is_rejected():
    prompts = scored.Prompts(tokenizer_files.load_tokenizer(TOKENIZER, 320), chat=False)
    document = Choice("Question: 2+2=\nAnswer: ye", ("s", " no"), 0)
    with pytest.raises(InputError) as rejected:
        list(scored.run(Scorer(), [document], prompts, None))
    assert str(rejected.value) == (
        "no token of its own begins with 's' behind 'Question: 2+2=\\nAnswer: ye'; put the blank "
        "at the border into the choice"
    )


class Scorer:
    """An engine by which a token's log-probability is its position below 0."""

    def score(self, prompts):
        return [Score(tokens, [-float(i) for i in range(1, len(tokens))], []) for tokens in prompts]

    def generate(self, prompts, params):
        return []

    @property
    def config(self):
        return SimpleNamespace(max_context=256)


def test_several_instructions_count_apart_and_together(read):
    line = {
        "prompt": "Say it.",
        "instruction_id_list": ["punctuation:no_comma", "combination:repeat_prompt"],
        "kwargs": [{"num_words": None}, {}],
    }
    unjudged = {
        "prompt": "Sag es.",
        "instruction_id_list": ["language:response_language"],
        "kwargs": [{"language": "de"}],
    }
    (one,), left_out = read(line, "", unjudged)
    assert left_out == 1 and one.max_new_tokens == 1280
    met = one.judge("*say* it. Done, yes")
    assert met["inst_level_strict_acc"] == [False, False]
    assert met["inst_level_loose_acc"] == [False, True]
    assert met["prompt_level_loose_acc"] == [False]
    outcomes = [scored.Outcome("", (), met), scored.Outcome("", (), one.judge("Say it. Done"))]
    metrics = scored.metrics(outcomes)
    assert metrics["inst_level_loose_acc"].mean == 3 / 4
    assert metrics["prompt_level_loose_acc"] == (0.5, 0.5)
    assert scored.metrics(outcomes[:1])["prompt_level_strict_acc"] == (0, None)


@pytest.mark.parametrize(
    "answer, strict, flexible",
    [
        ("It is 18.\n#### 1,018", True, True),
        ("So $1,018.", False, True),
        ("#### 1018. Then 7", True, False),
        ("1018 or 7", False, False),
        ("none", False, False),
    ],
)
def test_numbers_of_answers(read, answer, strict, flexible):
    (one,), _ = read({"question": "How many?", "answer": "1,000 and 18.\n#### 1,018"})
    assert one.text == "Question: How many?\nAnswer:" and one.stop == ("Question:",)
    assert one.judge(answer) == {
        "exact_match_strict": [strict], "exact_match_flexible": [flexible]
    }  # fmt: skip


def test_choices_and_exact_matches(read):
    found, _ = read({"text": "A", "choices": [" b", " c"], "label": 1, "id": 7})
    assert found == [Choice("A", (" b", " c"), 1)]
    (one,), _ = read({"text": "A", "target": " b", "stop": ["\n"]})
    assert one.stop == ("\n",)
    assert [one.judge(text)["exact_match"] for text in (" b", "b")] == [[True], [False]]


@pytest.mark.parametrize(
    "lines, why",
    [
        ([], "no line holds a document; each has choices, label, text, or"),
        (["\n  \n"], "no line holds a document"),
        ([{"prompt": "a", "instruction_id_list": ["language:response_language"], "kwargs": [{}]}],
         "no check here can judge any of its 1 documents"),
        ([{"prompt": "a"}], "line 1: a document has choices, label, text, or"),
        (["[1]"], "line 1: Expected `object`, got `array`"),
        (["{"], "line 1: Input data was truncated"),
        (["[" * 100_000], "line 1: "),
        ([{"text": "a", "choices": ["b"], "label": 0}], "choices are at least 2 texts"),
        ([{"text": "a", "choices": ["b", ""], "label": 0}], "choices are at least 2 texts"),
        ([{"text": "a", "choices": ["b", "c"], "label": 2}], "label is from 0 to 1, not 2"),
        ([{"text": " ", "choices": ["b", "c"], "label": 0}], "is not empty"),
        ([{"text": "a", "target": "b"}, {"question": "a", "answer": "b"}],
         "line 2: Object missing required field `text`"),
        ([{"question": "a", "answer": "12"}], "an answer ends in #### and a number"),
        ([{"prompt": "a", "instruction_id_list": [], "kwargs": []}], "one entry an instruction"),
        ([{"prompt": "a", "instruction_id_list": ["b"], "kwargs": [{}]}],
         "instruction 'b' is not checked here; valid are keywords:existence"),
        ([{"prompt": "a", "instruction_id_list": ["keywords:existence"], "kwargs": [{}]}],
         "kwargs of keywords:existence: keywords is missing; valid is a list of texts"),
        ([{"prompt": "a", "instruction_id_list": ["length_constraints:number_words"],
           "kwargs": [{"relation": "about", "num_words": 3}]}],
         "number_words: relation='about': valid is 'at least' or 'less than'"),
        ([{"prompt": "a", "instruction_id_list": ["keywords:existence"],
           "kwargs": [{"keywords": ["b", "("]}]}],
         "kwargs of keywords:existence: keywords: missing )"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_task(read, lines, why):
    with pytest.raises(InputError) as refused:
        read(*lines)
    assert why in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "id, kwargs, why",
    [
        ("length_constraints:nth_paragraph_first_word",
         {"num_paragraphs": 2, "nth_paragraph": 1, "first_word": 7},
         "first_word=7: valid is a text"),
        ("keywords:forbidden_words", {"forbidden_words": ["a", "(?i)x"]},
         "forbidden_words: global flags not at the start of the expression at position 2 in "
         r"'\\b(?i)x\\b'; valid is a regular expression"),
        ("keywords:existence", {"keywords": "abc"}, "keywords='abc': valid is a list of texts"),
        ("keywords:existence", {"keywords": ["a", 7]}, "keywords=['a', 7]: valid is a list of"),
        ("keywords:frequency",
         {"keyword": "a{99999999999999}", "frequency": 1, "relation": "at least"},
         "keyword: the repetition number is too large in 'a{9"),
        ("keywords:letter_frequency",
         {"letter": "ab", "let_frequency": 1, "let_relation": "at least"},
         "letter='ab': valid is one character"),
        ("detectable_format:number_bullet_lists", {"num_bullets": True},
         "num_bullets=True: valid is a whole number"),
        ("detectable_format:multiple_sections", {"section_spliter": "(", "num_sections": 1},
         "section_spliter: missing )"),
        ("detectable_content:postscript", {"postscript_marker": "["},
         "postscript_marker: unterminated character set"),
    ],
)  # fmt: skip
def test_kwargs_are_checked_before_an_answer_is(id, kwargs, why):
    with pytest.raises(InputError) as refused:
        instructions.read("", [id], [kwargs])
    assert str(refused.value).startswith(f"kwargs of {id}: {why}")


def test_every_kwarg_has_a_type_and_a_use():
    makers = instructions._INSTRUCTIONS.values()
    names = {name for make in makers for name in signature(make).parameters}
    assert names == instructions._KWARGS.keys()


def test_two_forms_need_different_fields():
    """So the first that fits is the only one, but for documents with further fields."""
    fields = documents._FIELDS.values()
    assert not any(a <= b or b <= a for a, b in itertools.combinations(fields, 2))
