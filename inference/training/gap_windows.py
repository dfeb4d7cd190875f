"""Windows with gaps, from which a model learns to fill in the middle (Bavarian et al. 2022, arXiv
2207.14255): the text of a window is cut in three, and its middle moves behind the other two.
"""

import numpy as np

from configs.errors import InputError
from configs.recipes.training import TrainingConfig
from inference.text.infill import MISSING, Gap
from inference.text.tokenizer import Tokenizer
from inference.training.windows import Windows


class GapWindows:
    """`loop.Data`: windows, the share `rate` of which have a gap.

    A window is cut at two of its characters, each as likely as any other, because a token may be
    cut where a user types. Its parts are encoded anew, between the tokenizer's marks, in one of the
    orders of these; the end token follows the middle. Of a window with ends of documents, the
    longest document has the gap.

    Raises:
        InputError: the tokenizer has no marks.
    """

    def __init__(self, windows: Windows, tokenizer: Tokenizer, rate: float, seed: int):
        if tokenizer.infill is None:
            raise InputError(f"training.fim_rate={rate}: {MISSING}")
        self._windows, self._rate, self._seed = windows, rate, seed
        self._tokenizer, self._infill = tokenizer, tokenizer.infill
        orders = tokenizer.infill.layout.orders
        self._orders = [order.index("s") < order.index("p") for order in orders]
        self._end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """{"tokens": i32[batch, W + 1]}; a function of seed and step alone."""
        tokens_YW = self._windows.batch(step)["tokens"]
        rng = np.random.default_rng((self._seed, step))
        for row, has_gap in enumerate(rng.random(len(tokens_YW)) < self._rate):
            if has_gap:
                tokens_YW[row] = self._with_gap(tokens_YW[row], rng)
        return {"tokens": tokens_YW}

    def _with_gap(self, tokens_W: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """The same tokens with a gap; as they are where the middle leaves no room for the rest."""
        start, stop = self._longest_document(tokens_W)
        text = self._tokenizer.decode(tokens_W[start:stop].tolist())
        first, second = sorted(rng.integers(0, len(text), 2, endpoint=True).tolist())
        middle = [*self._infill.encode_within(text[first:second]), *self._end]
        gap = Gap(text[:first], text[second:], suffix_first=bool(rng.choice(self._orders)))
        room = stop - start - len(middle)
        if room <= self._infill.num_marks(gap, add_special=False):
            return tokens_W
        around = self._infill.encode(gap, add_special=False, limit=room)
        written = np.array([*around, *middle], tokens_W.dtype)
        return np.concatenate([tokens_W[:start], written, tokens_W[start + len(written) :]])

    def _longest_document(self, tokens_W: np.ndarray) -> tuple[int, int]:
        """Where it begins and ends in the window."""
        ends = np.flatnonzero(np.isin(tokens_W, self._end))
        starts, stops = [0, *(ends + 1)], [*ends, len(tokens_W)]
        return max(zip(starts, stops, strict=True), key=lambda bounds: bounds[1] - bounds[0])


def of_text(
    tokens: np.ndarray, training: TrainingConfig, tokenizer: Tokenizer
) -> tuple[Windows | GapWindows, str]:
    """Windows of text, with gaps if the configuration says so, and what they are made of; raises
    InputError as they do.
    """
    windows = Windows(tokens, training.window, training.batch, training.seed)
    size = f"{len(tokens)} tokens of text, {windows.count} windows"
    if not training.fim_rate:
        return windows, size
    return GapWindows(windows, tokenizer, training.fim_rate, training.seed), size
