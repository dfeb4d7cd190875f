"""A task's documents in an engine: ends of texts scored, questions answered greedily."""

import dataclasses
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from configs.errors import InputError, shown
from inference.benchmark.quality import perplexity
from inference.benchmark.quality.tasks.documents import Choice, Document, Question, Verdict
from inference.request import SamplingParams
from inference.text import layouts
from inference.text.thoughts import Stage
from inference.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from inference.engine import Engine

_AT_ONCE = 64  # documents: keeps every sequence of the engine busy, and the bar moving


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A model's result for one document.

    Attributes:
        answer: to a question; None for a document with choices.
        logprobs: of each choice; () for a question.
        verdict: which criteria the result meets, by the name of a metric.
    """

    answer: str | None
    logprobs: tuple[float, ...]
    verdict: Verdict

    def to_json(self) -> str:
        return json.dumps(
            {"answer": self.answer, "logprobs": self.logprobs, "met": dict(self.verdict)}
        )


class Metric(NamedTuple):
    """The share of criteria met over all documents, and its standard error; None: of only one."""

    mean: float
    error: float | None


class Prompts:
    """Encodes texts of documents as prompts.

    Attributes:
        shown_ids: special tokens that mark thoughts, so that an answer's text has them.
    """

    def __init__(self, tokenizer: Tokenizer, chat: bool):
        """`chat`: the chat template writes each text as a user's message; otherwise a text follows
        the tokens that the tokenizer puts before it.
        """
        self._tokenizer, self._chat = tokenizer, chat
        self._start = perplexity.start(tokenizer)
        self._layout = layouts.of_template(tokenizer.template) if chat else None
        marks = self._layout.shown(Stage.BEFORE) if self._layout else ()
        self.shown_ids = tuple(tokenizer.specials_in(marks).values())

    def of(self, text: str) -> list[int]:
        if self._chat:
            messages = [{"role": "user", "content": text}]
            return list(self._tokenizer.apply_chat_template(messages, True))
        return self._start + self._encoded(text)

    def with_end(self, text: str, end: str) -> tuple[list[int], int]:
        """Returns the tokens of a text and its end, and the position of the end's first token.

        Raises:
            InputError: the end has no token of its own, because it is merged into the text's last.
        """
        if self._chat:
            prompt = self.of(text)
            tokens = prompt + self._encoded(end)
        else:
            prompt = self._start + self._encoded(text.rstrip())  # as lm-eval divides them
            tokens = self._start + self._encoded(text + end)
        if len(prompt) >= len(tokens):
            raise InputError(
                f"no token of its own begins with {shown(end)} behind {shown(text[-60:])}; put the "
                "blank at the border into the choice"
            )
        return tokens, len(prompt)

    def answer(self, prompt: list[int], text: str) -> str:
        """Returns an answer's text without the thought in it."""
        if self._layout is None:
            return text
        reader = self._layout.reader(self._layout.stage_after(self._tokenizer, prompt))
        segments = reader.push(text) + reader.finish()
        return "".join(segment.text for segment in segments if not segment.is_thought)

    def _encoded(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False)


def run(
    engine: "Engine",
    documents: Sequence[Document],
    prompts: Prompts,
    max_new_tokens: int | None,
) -> Iterator[Outcome]:
    """Yields the outcome of each document in their order; all documents have one form.

    Args:
        max_new_tokens: of an answer; None: as many as the document's task grants.

    Raises:
        InputError: a document leaves no room for an answer in the context, or no token of its own
            begins a choice.
    """
    for first in range(0, len(documents), _AT_ONCE):
        batch = documents[first : first + _AT_ONCE]
        choices = [document for document in batch if isinstance(document, Choice)]
        questions = [document for document in batch if isinstance(document, Question)]
        yield from _scored(engine, choices, prompts)
        yield from _answered(engine, questions, prompts, max_new_tokens)


def metrics(outcomes: Iterable[Outcome]) -> dict[str, Metric]:
    """Returns each metric over all outcomes, of which there is one at least."""
    met: defaultdict[str, list[bool]] = defaultdict(list)
    for outcome in outcomes:
        for name, followed in outcome.verdict.items():
            met[name] += followed
    return {name: _metric(followed) for name, followed in met.items()}


def _metric(met: Sequence[bool]) -> Metric:
    mean = sum(met) / len(met)
    if len(met) == 1:
        return Metric(mean, None)
    return Metric(mean, math.sqrt(mean * (1 - mean) / (len(met) - 1)))


def _scored(engine: "Engine", documents: Sequence[Choice], prompts: Prompts) -> Iterator[Outcome]:
    """Chooses by the log-probability of each end, and by that per character of the end."""
    texts = [
        prompts.with_end(document.text, end) for document in documents for end in document.choices
    ]
    scores = engine.score([tokens for tokens, _ in texts])
    sums = iter(  # the first token of a text has no log-probability
        [
            sum(score.logprobs[max(first - 1, 0) :])
            for score, (_, first) in zip(scores, texts, strict=True)
        ]
    )
    for document in documents:
        logprobs = tuple(itertools.islice(sums, len(document.choices)))
        lengths = [len(end) for end in document.choices]
        per_character = [logprob / n for logprob, n in zip(logprobs, lengths, strict=True)]
        yield Outcome(
            None,
            logprobs,
            {
                "acc": [_likeliest(logprobs) == document.label],
                "acc_norm": [_likeliest(per_character) == document.label],
            },
        )


def _likeliest(logprobs: Sequence[float]) -> int:
    return max(range(len(logprobs)), key=logprobs.__getitem__)


def _answered(
    engine: "Engine", documents: Sequence[Question], prompts: Prompts, max_new_tokens: int | None
) -> Iterator[Outcome]:
    tokens = [prompts.of(document.text) for document in documents]
    room = engine.config.max_context
    params = []
    for prompt, document in zip(tokens, documents, strict=True):
        num_new = document.max_new_tokens if max_new_tokens is None else max_new_tokens
        if len(prompt) >= room:
            raise InputError(
                f"a text of {len(prompt)} tokens leaves no room for an answer in the context of "
                f"{room}: {document.text[:60]!r}"
            )
        params.append(
            SamplingParams(
                max_new_tokens=min(num_new, room - len(prompt)),
                stop=document.stop,
                shown_special_ids=prompts.shown_ids,
            )
        )
    completions = engine.generate(tokens, params)
    for prompt, document, completion in zip(tokens, documents, completions, strict=True):
        answer = prompts.answer(prompt, completion.text)
        yield Outcome(answer, (), document.judge(answer))
