"""Which pages of a prompt stay cached where its request has a budget: those that the prompt's end
attends to most (SnapKV, Li et al. 2024, arXiv 2404.14469), chosen once, before anything is
generated. Integers and numpy only: no device memory here.

The last `OBSERVED_TOKENS` tokens before the prompt's last one choose: they are in the cache when
decoding and forks start. Their own pages stay, and so does the first one, which softmax attention
rests on. Where the paper chooses tokens for each head, whole pages are freed here, of all heads and
of all layers that keep all of the past.
"""

import numpy as np

from configs.errors import InputError
from configs.settings.requests import OBSERVED_TOKENS

_POOLED = 7  # tokens whose sum stands for the one in the middle, so that neighbours stay together


def num_excess_tokens(num_prompt_tokens: int, budget: int | None, page_tokens: int) -> int:
    """Tokens of a prompt that its budget has no room for, in whole pages; 0 where all stays.

    Raises:
        InputError: there is no room for what must stay.
    """
    if budget is None or budget >= num_prompt_tokens:
        return 0
    num_kept, least = budget // page_tokens, len(_must_stay(num_prompt_tokens, page_tokens))
    if num_kept < least:
        raise InputError(
            f"prompt_budget of {num_prompt_tokens} tokens is at least "
            f"{min(least * page_tokens, num_prompt_tokens)}, not {budget}: the first page of "
            f"{page_tokens} stays, and those of the last {OBSERVED_TOKENS + 1} tokens"
        )
    return (-(-num_prompt_tokens // page_tokens) - num_kept) * page_tokens


def choose(
    weight_S: np.ndarray, num_prompt_tokens: int, num_excess_tokens: int, page_tokens: int
) -> list[int]:
    """Indices of the pages to give up, in their order: those whose tokens have the least weight
    together, of equals the later ones.

    Args:
        weight_S: float32, of each token of the prompt but its last; more are not looked at.
        num_prompt_tokens: of the prompt, its last one included.
        num_excess_tokens: to give up, in whole pages.
        page_tokens: tokens a page.
    """
    weight_S = weight_S[: num_prompt_tokens - 1].astype(np.float64)
    pooled_S = np.convolve(weight_S, np.ones(_POOLED), "same")
    sum_P = np.add.reduceat(pooled_S, np.arange(0, len(pooled_S), page_tokens))
    best_first = np.argsort(-sum_P, kind="stable").tolist()
    must_stay = _must_stay(num_prompt_tokens, page_tokens)
    open_to_choice = [index for index in best_first if index not in must_stay]
    num_dropped = num_excess_tokens // page_tokens
    return sorted(open_to_choice[len(open_to_choice) - num_dropped :])


def _must_stay(num_prompt_tokens: int, page_tokens: int) -> set[int]:
    """Pages of the prompt's first token, of those that observe it, and of its last."""
    last = num_prompt_tokens - 1
    return {0, *range(max(0, last - OBSERVED_TOKENS) // page_tokens, last // page_tokens + 1)}
