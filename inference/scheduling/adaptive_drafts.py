"""How many drafts a step verifies: as many as bring the most tokens a second.

For each sequence the policy knows how often its first, second, ... draft was accepted, and for each
step shape that only decodes how long a step took. Texts and machines change, so the exploration
bonus of a width grows until the width is tried again, later the more a trial costs: once each width
has a time, all trials together lose less than one step in 200. Rates are integers, in 1/65,536, and
times are integers, in nanoseconds.
"""

import collections
from collections.abc import Sequence as Items

from configs.engine import EngineConfig
from inference.scheduling.sequence import Sequence
from inference.scheduling.step_shapes import StepShape, choose, enumerate_shapes

_ONE = 1 << 16
_BONUS = _ONE // 2  # that a first draft is accepted, before anything is known
_SHIFT = 3  # a rate remembers some 8 drafts of a sequence,
_ALL_SHIFT = 6  # or 64 of all
_PATIENCE = 256  # steps of which trials lose one; times that vary make it some more
_TIMES = 8  # that a shape is asked for before it has a time: rows may join or leave each time
_NANOSECONDS = 1_000_000_000


class AdaptiveDrafts:
    """How many drafts sequences have verified, step by step.

    Attributes:
        acceptance: of all sequences, how often the n-th draft, from 0 on, was accepted where it was
            asked for.
    """

    def __init__(self, engine: EngineConfig):
        self._shapes = tuple(shape for shape in enumerate_shapes(engine) if not shape.prefill[0])
        self._widths = sorted({shape.decode[1] for shape in self._shapes})
        longest = 1 + engine.drafts.levels
        self._max_tokens = {width: min(width, longest) for width in self._widths}  # tokens of a row
        # A trial that gains nothing loses its bonus: at this pace a width loses its own share.
        self._pace = _PATIENCE * sum(self._max_tokens.values())
        self.acceptance = [_BONUS >> n for n in range(self._max_tokens[self._widths[-1]] - 1)]
        self._rates: dict[int, list[int]] = {}  # by sequence
        self._has_run: set[StepShape] = set()
        self._cost: dict[StepShape, int] = {}
        self._num_timed: collections.Counter[StepShape] = collections.Counter()  # for a time
        self._last_taken = dict.fromkeys(self._widths, 0)
        self._num_steps = 0

    def choose(self, decoding: Items[Sequence], num_rows: int, is_alone: bool) -> int:
        """The most drafts of a sequence in the next step, where these decode. With prompts in the
        step a draft is taken to add the time that it adds without.

        Args:
            decoding: of all data shards.
            num_rows: of the step's decode rectangle, at least.
            is_alone: no prompt is in the step.
        """
        drafting = [sequence for sequence in decoding if sequence.speculates]
        if not drafting:
            return 0
        self._rates = {s.id: self._rates.get(s.id) or list(self.acceptance) for s in drafting}
        is_greedy = all(sequence.params.is_greedy for sequence in decoding)
        self._num_steps += is_alone
        figures = {}  # width -> time, tokens
        for width in self._widths:
            shape = choose(self._shapes, num_rows, 0, False, is_greedy, width)
            if shape in self._cost:
                gained = sum(sum(rates[: width - 1]) for rates in self._rates.values())
                figures[width] = self._cost[shape], len(decoding) * _ONE + gained
            elif is_alone:
                self._num_timed[shape] += 1
                if self._num_timed[shape] <= _TIMES:
                    return self._take(width)
        if not figures:
            return self._widths[-1] - 1
        best = min(figures, key=lambda width: figures[width][0] / figures[width][1])
        if not is_alone:
            return best - 1
        time, tokens = figures[best]
        for width, (width_time, width_tokens) in figures.items():
            age = self._num_steps - self._last_taken[width]
            bonus = len(decoding) * self._max_tokens[width] * _ONE * age // self._pace
            if width != best and width_time * tokens < (width_tokens + bonus) * time:
                return self._take(width)
        return self._take(best)

    def _take(self, width: int) -> int:
        self._last_taken[width] = self._num_steps
        return width - 1

    def verified(self, sequence: Sequence, num_verified: int, num_accepted: int) -> None:
        """Takes how many of a sequence's drafts were accepted, those that its proposer did not have
        among the verified.
        """
        sequence_rates = self._rates.get(sequence.id, [])
        for rates, shift in ((sequence_rates, _SHIFT), (self.acceptance, _ALL_SHIFT)):
            for n in range(min(num_verified, len(rates))):
                rates[n] += ((_ONE if n < num_accepted else 0) - rates[n]) >> shift

    def took(self, shape: StepShape, seconds: float) -> None:
        """Takes the time of a step. The first of a shape starts its program, too; and one that was
        late says little: a time grows by a sixteenth at most, and falls by half of the difference.
        """
        if shape.prefill[0] or shape not in self._has_run:
            self._has_run.add(shape)
            return
        new = max(1, int(seconds * _NANOSECONDS))
        old = self._cost.get(shape, new)
        self._cost[shape] = (old + new) // 2 if new < old else min(new, old * 17 // 16)
