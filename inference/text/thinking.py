"""An answer that may begin with a thought: how long that may be, and what may follow."""

from collections.abc import Iterable, Sequence

import numpy as np

from configs.errors import InputError
from inference.text import thoughts
from inference.text.grammar import Grammar
from inference.text.thoughts import Progress, Stage
from inference.text.tokenizer import Tokenizer

UNLIMITED = 1 << 30  # tokens: more than any context has


class Thinking:
    """A thought of at most `budget` tokens, which its closing then ends whatever the model would
    say; and behind it, or where none comes, the text of a grammar.

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
        marks = thoughts.of_template(tokenizer.template)
        if marks is None:
            raise InputError("thinking_budget needs a chat template that marks thoughts")
        self._token_bytes = tokenizer.token_bytes
        self._opening, self.closing = (
            tokenizer.encode(mark, add_special=False) for mark in (marks.opening, marks.closing)
        )
        self._progress = Progress(marks, marks.stage_after(tokenizer, prompt))
        self._budget = UNLIMITED if budget is None else budget
        self._behind = behind
        self._num_opening = self._num_closing = 0  # tokens of these that had to come
        num_words = -(-tokenizer.vocab_size // 32)
        self._all = np.full(num_words, 2**32 - 1, np.uint32)
        self._goes_on = self._all & ~self._only(*end_ids)

    @property
    def room(self) -> int:
        if self._behind is not None:
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
        if self._is_spent:
            return self._only(self.closing[self._num_closing])
        if self._behind is None:
            return self._all
        if self._progress.stage is Stage.WITHIN:
            return self._goes_on
        if self._progress.stage is Stage.BEHIND:
            return self._behind.mask()
        opening = self._only(self._opening[self._num_opening])
        if self._num_opening:
            return opening
        others = self._behind.mask()
        return others if self._is_ambiguous(others) else opening | others

    def accept(self, token: int) -> None:
        progress = self._progress
        if self._behind is not None and progress.stage is Stage.BEFORE:
            is_answer = not self._num_opening and self._is_ambiguous(self._behind.mask())
            if is_answer or token != self._opening[self._num_opening]:
                progress.stage = Stage.BEHIND
            self._num_opening += 1
        if progress.stage is Stage.BEHIND:
            if self._behind is not None:
                self._behind.accept(token)
            return
        self._num_closing += self._is_spent
        progress.accept(self._token_bytes(token, skip_special=False))

    def start_over(self, tokens: Sequence[int]) -> None:
        self._progress.reset()
        self._num_opening = self._num_closing = 0
        if self._behind is not None:
            self._behind.start_over(())
        for token in tokens:
            self.accept(token)

    @property
    def _is_spent(self) -> bool:
        """Whether nothing but the closing may come."""
        progress = self._progress
        return progress.stage is Stage.WITHIN and progress.num_tokens >= self._budget

    def _is_ambiguous(self, others: np.ndarray) -> bool:
        """Whether an opening's first token may begin another text, too, of these first tokens: then
        no thought comes, since a grammar does not go back.
        """
        return len(self._opening) > 1 and bool((others & self._only(self._opening[0])).any())

    def _only(self, *tokens: int) -> np.ndarray:
        mask = np.zeros_like(self._all)
        for token in tokens:
            mask[token // 32] |= np.uint32(1 << token % 32)
        return mask
