"""The thought of an answer: its text apart from the answer's, and how many tokens it has."""

import dataclasses
from typing import NamedTuple

from inference.request import WIRE_NAMES, SamplingParams
from inference.server.endpoints.answers import Piece
from inference.server.frames import Loaded
from inference.server.protocol.errors import invalid
from inference.text import thoughts
from inference.text.thoughts import Marks, Progress, Stage, ThoughtReader
from inference.text.tokenizer import Tokenizer

_BUDGET = WIRE_NAMES["thinking_budget"]
_END_TOKENS = 16  # a mark and the blanks behind it have at most so many


class Thinking(NamedTuple):
    """How answers to a prompt begin."""

    marks: Marks
    stage: Stage


def of_prompt(tokenizer: Tokenizer, tokens: list[int]) -> Thinking | None:
    """Returns how answers to a prompt begin; None: the model has no thoughts."""
    marks = thoughts.of_template(tokenizer.template)
    if marks is None:
        return None
    end = tokenizer.decode(tokens[-_END_TOKENS:], skip_special=False)
    return Thinking(marks, marks.stage_after(end))


def limited(
    params: SamplingParams, thinking: Thinking | None, facts: Loaded, tokenizer: Tokenizer
) -> SamplingParams:
    """Returns how to sample an answer that may have a thought, of at most the request's budget, and
    whose text has the marks of that.

    Raises:
        ApiError: 400, a budget of thoughts that nothing marks, or more than the context.
    """
    budget = params.thinking_budget
    if budget is not None:
        if thinking is None:
            why = "needs a model whose chat template marks thoughts"
            raise invalid(_BUDGET, why, "unsupported")
        if not facts.accepts_grammars:
            raise invalid(_BUDGET, "is not supported by this server", "unsupported")
        if budget > facts.max_context:
            raise invalid(_BUDGET, f"is at most the context of {facts.max_context} tokens")
    if thinking is None or thinking.stage is Stage.BEHIND:
        return dataclasses.replace(params, thinks=False, thinking_budget=None)
    specials = tokenizer.specials_in(thinking.marks)
    shown = {*params.shown_special_ids, *specials.values()}
    return dataclasses.replace(params, thinks=True, shown_special_ids=tuple(sorted(shown)))


class Reasoning:
    """Reads the thought of one answer."""

    def __init__(self, thinking: Thinking, tokenizer: Tokenizer):
        self._reader = ThoughtReader(*thinking)
        self._progress = Progress(*thinking)
        self._token_bytes = tokenizer.token_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens of the thought so far."""
        return self._progress.num_tokens

    def read(self, piece: Piece) -> tuple[str, str]:
        """Returns a piece's new text: of the thought, and of the answer."""
        for token in piece.token_ids:
            self._progress.accept(self._token_bytes(token, skip_special=False))
        thought, answer = self._reader.push(piece.text)
        if piece.finish_reason is not None:
            rest = self._reader.finish()
            thought, answer = thought + rest[0], answer + rest[1]
        return thought, answer
