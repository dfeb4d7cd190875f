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


class AnswerStart(NamedTuple):
    """Where answers to a prompt begin, of a model whose thoughts have these marks.

    Attributes:
        is_known: the engine finds the same stage at the end of the prompt.
    """

    marks: Marks
    stage: Stage
    is_known: bool = True


def of_prompt(tokenizer: Tokenizer, tokens: list[int], begun: str) -> AnswerStart | None:
    """Returns where answers to a prompt begin, which continue the message `begun`, if it is not
    empty; None: the model has no thoughts.
    """
    marks = thoughts.of_template(tokenizer.template)
    if marks is None:
        return None
    stage = marks.stage_after(tokenizer, tokens)
    if not begun or stage is Stage.WITHIN:
        return AnswerStart(marks, stage)
    return AnswerStart(marks, marks.stage_within(begun), is_known=False)


def limited(
    params: SamplingParams,
    start: AnswerStart | None,
    facts: Loaded,
    tokenizer: Tokenizer,
    holds_in_thoughts: bool,
) -> SamplingParams:
    """Returns how to sample an answer that may have a thought, of at most the request's budget, and
    whose text has the marks of that.

    Args:
        holds_in_thoughts: the grammar permits any thought, and holds there, too, unless a budget
            is what limits that.

    Raises:
        ApiError: 400, a budget of thoughts that nothing marks, or more than the context.
    """
    budget = params.thinking_budget
    if budget is not None:
        if start is None:
            why = "needs a model whose chat template marks thoughts"
            raise invalid(_BUDGET, why, "unsupported")
        if not facts.accepts_grammars:
            raise invalid(_BUDGET, "is not supported by this server", "unsupported")
        if budget > facts.max_context:
            raise invalid(_BUDGET, f"is at most the context of {facts.max_context} tokens")
        if not start.is_known and start.stage is not Stage.BEHIND:
            raise invalid(_BUDGET, "does not go with the beginning of a thought")
    if start is None or start.stage is Stage.BEHIND:
        return dataclasses.replace(params, thinks=False, thinking_budget=None)
    specials = tokenizer.specials_in((start.marks.opening, start.marks.closing))
    shown = {*params.shown_special_ids, *specials.values()}
    thinks = start.is_known and not (holds_in_thoughts and budget is None)
    return dataclasses.replace(params, thinks=thinks, shown_special_ids=tuple(sorted(shown)))


class Reasoning:
    """Reads the thought of one answer."""

    def __init__(self, start: AnswerStart, tokenizer: Tokenizer):
        self._reader = ThoughtReader(start.marks, start.stage)
        self._progress = Progress(start.marks, start.stage)
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
            last_thought, last_answer = self._reader.finish()
            thought, answer = thought + last_thought, answer + last_answer
        return thought, answer
