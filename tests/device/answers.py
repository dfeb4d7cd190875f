"""What an engine on the device at hand answers, to be compared with another's."""

from collections.abc import Sequence

from inference.engine import Engine
from scripts.reports.agreement import Answer
from tests import fakes

_LENGTHS = (300, 70, 1, 128)  # of prompts, some longer than pages
_NEW_TOKENS = 40


def answers(
    engine: Engine, texts: Sequence[list[int]] | None = None
) -> tuple[list[Answer], Sequence[list[int]]]:
    """Greedy answers to prompts that are served together, then scores of texts in chunks; and the
    texts, which are the prompts and their answers unless told.

    Args:
        engine: whose vocabulary has 131 tokens, with `top_logprobs`.
    """
    prompts = fakes.prompts(_LENGTHS, 131)
    decoded = engine.generate(prompts, fakes.greedy(_NEW_TOKENS))
    texts = texts or [
        [*prompt, *answer.token_ids] for prompt, answer in zip(prompts, decoded, strict=True)
    ]
    found = [Answer(each.token_ids, each.logprobs, each.top_logprobs) for each in decoded]
    for text, score in zip(texts, engine.score(texts), strict=True):
        found.append(Answer(text[1:], score.logprobs, []))
    return found, texts
