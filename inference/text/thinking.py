"""An answer that may have thoughts: how long these may be, and what may follow them."""

from collections.abc import Iterable, Sequence

import numpy as np

from configs.errors import InputError
from inference.text import layouts
from inference.text.grammar import Grammar
from inference.text.thoughts import Stage
from inference.text.tokenizer import Tokenizer

UNLIMITED = 1 << 30  # tokens: more than any context has


class Thinking:
    """Thoughts of at most `budget` tokens, which their closing then ends whatever the model would
    say; and behind them, or where none comes, the text of a grammar.

    Attributes:
        closing: tokens that end a thought whose budget is spent.
        room: tokens that may be any, whatever they are; of the next one it depends on them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        budget: int | None = None,
        behind: Grammar | None = None,
        end_ids: Iterable[int] = (),
    ):
        """`end_ids` end an answer, which does not end within a thought if something has to follow.

        Raises:
            InputError: the model's chat template knows no thoughts.
        """
        layout = layouts.of_template(tokenizer.template)
        if layout is None:
            raise InputError("thinking_budget needs a chat template that marks thoughts")
        self._layout = layout
        self._tokenizer = tokenizer
        self._opening = self._encoded(layout.opening)
        exits = layout.exits if behind is None else (layout.between,)
        self._closings = [self._encoded(layout.closing + text) for text in exits]
        self.closing = self._closings[0]
        self._progress = layout.progress(layout.stage_after(tokenizer, prompt))
        self._budget = UNLIMITED if budget is None else budget
        self._behind = behind
        num_words = -(-tokenizer.vocab_size // 32)
        self._all = np.full(num_words, 2**32 - 1, np.uint32)
        outside = tokenizer.specials_in(layout.outside).values()
        self._goes_on = self._all & ~self._only(*end_ids, *outside)
        self._reset()

    def _reset(self) -> None:
        self._progress.reset()
        self._due: list[list[int]] = []  # one of these has to come
        self._num_opening = 0  # tokens of an opening that have come
        self._has_thought = self._progress.stage is Stage.WITHIN
        self._is_behind = self._progress.stage is Stage.BEHIND
        self._may_be_behind = True  # those tokens begin a text of the grammar, too

    @property
    def room(self) -> int:
        if self._behind is not None or self._due:
            return 0
        if self._progress.stage is Stage.BEHIND:
            return UNLIMITED
        is_open = self._progress.stage is Stage.WITHIN
        return max(0, self._budget - self._progress.num_tokens) + (not is_open)

    @property
    def has_failed(self) -> bool:
        return self._behind is not None and self._behind.has_failed

    @property
    def is_complete(self) -> bool:
        return self._behind is not None and self._behind.is_complete

    @property
    def failure(self) -> str:
        return "" if self._behind is None else self._behind.failure

    def mask(self) -> np.ndarray:
        if due := self._due or self._closings_due:
            return self._only(*(tokens[0] for tokens in due))
        if self._behind is None:
            return self._all
        if self._is_behind:
            return self._behind.mask()
        if self._progress.stage is Stage.WITHIN:
            return self._goes_on
        mask = self._behind.mask() if self._may_be_behind else np.zeros_like(self._all)
        return mask | self._only(self._opening[self._num_opening]) if self._may_think else mask

    def accept(self, token: int) -> None:
        is_within = self._progress.stage is Stage.WITHIN
        due = [tokens[1:] for tokens in self._due or self._closings_due if tokens[0] == token]
        self._due = [] if [] in due else due
        if self._behind is not None and not (is_within or due):
            self._choose(token, self._behind)
        if not self._is_behind:
            self._follow(token, is_within)

    def start_over(self, tokens: Sequence[int]) -> None:
        self._reset()
        if self._behind is not None:
            self._behind.start_over(())
        for token in tokens:
            self.accept(token)

    def _choose(self, token: int, behind: Grammar) -> None:
        """Takes a token of an opening, or of the grammar's text, or of what may become either."""
        if not self._is_behind:
            self._is_behind = not (self._may_think and token == self._opening[self._num_opening])
            self._num_opening += 1
            self._may_be_behind &= self._is_behind or _has(behind.mask(), token)
        if self._may_be_behind:
            behind.accept(token)

    def _follow(self, token: int, was_within: bool) -> None:
        """Notes where a thought begins and ends."""
        progress = self._progress
        progress.accept(self._tokenizer.token_bytes(token, skip_special=False))
        is_within = progress.stage is Stage.WITHIN
        self._has_thought |= is_within
        if self._behind is None:
            return
        if is_within and not was_within:
            self._num_opening, self._may_be_behind = 0, True
            self._behind.start_over(())
        elif was_within and not (is_within or self._due):
            self._due = [self._encoded(progress.due)] if progress.due else []
        self._is_behind = progress.stage is Stage.BEHIND

    @property
    def _closings_due(self) -> list[list[int]]:
        """What may come alone, where a thought's budget is spent."""
        progress = self._progress
        is_spent = progress.stage is Stage.WITHIN and progress.num_tokens >= self._budget
        return self._closings if is_spent else []

    @property
    def _may_think(self) -> bool:
        """Whether a thought may begin, or its opening go on."""
        return not self._has_thought or self._progress.num_tokens < self._budget

    def _encoded(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False)

    def _only(self, *tokens: int) -> np.ndarray:
        mask = np.zeros_like(self._all)
        for token in tokens:
            mask[token // 32] |= np.uint32(1 << token % 32)
        return mask


def _has(mask: np.ndarray, token: int) -> bool:
    return bool(mask[token // 32] >> np.uint32(token % 32) & np.uint32(1))
