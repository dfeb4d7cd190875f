"""The thoughts of an answer: their text apart from the answer's, and how many tokens they have."""

import dataclasses
from typing import NamedTuple

from inference.request import WIRE_NAMES, SamplingParams
from inference.server.endpoints.answers import Piece
from inference.server.frames import Loaded
from inference.server.protocol.errors import invalid
from inference.text import layouts
from inference.text.layouts import Layout
from inference.text.thoughts import Segment, Stage
from inference.text.tokenizer import Tokenizer

_BUDGET = WIRE_NAMES["thinking_budget"]


class AnswerStart(NamedTuple):
    """Where answers to a prompt begin, of a model whose thoughts are laid out so.

    Attributes:
        is_known: the engine finds the same stage at the end of the prompt.
    """

    layout: Layout
    stage: Stage
    is_known: bool = True


def of_prompt(tokenizer: Tokenizer, tokens: list[int], begun: str) -> AnswerStart | None:
    """Returns where answers to a prompt begin, which continue the message `begun`, if it is not
    empty; None: the model has no thoughts.
    """
    layout = layouts.of_template(tokenizer.template)
    if layout is None:
        return None
    stage = layout.stage_after(tokenizer, tokens)
    if not begun or stage is Stage.WITHIN:
        return AnswerStart(layout, stage)
    return AnswerStart(layout, layout.stage_within(begun), is_known=False)


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
    if start is None:
        return dataclasses.replace(params, thinks=False, thinking_budget=None)
    specials = tokenizer.specials_in(start.layout.shown(start.stage))
    shown = tuple(sorted({*params.shown_special_ids, *specials.values()}))
    params = dataclasses.replace(params, shown_special_ids=shown)
    if start.stage is Stage.BEHIND:
        return dataclasses.replace(params, thinks=False, thinking_budget=None)
    thinks = start.is_known and not (holds_in_thoughts and budget is None)
    return dataclasses.replace(params, thinks=thinks)


class Reasoning:
    """Reads the thoughts of one answer."""

    def __init__(self, start: AnswerStart, tokenizer: Tokenizer, divides: bool = True):
        """`divides`: otherwise thoughts are a part of the answer, with their marks."""
        self._reader = start.layout.reader(start.stage, divides)
        self._progress = start.layout.progress(start.stage)
        self._token_bytes = tokenizer.token_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens of the thoughts so far."""
        return self._progress.num_tokens

    def read(self, piece: Piece) -> list[Segment]:
        """Returns a piece's new text: of thoughts, and of the answer."""
        for token in piece.token_ids:
            self._progress.accept(self._token_bytes(token, skip_special=False))
        segments = self._reader.push(piece.text)
        return segments if piece.finish_reason is None else segments + self._reader.finish()
