"""Features that requests may ask for; each of them makes the step larger."""

import dataclasses
from typing import ClassVar

from configs.settings.section import Section, setting
from configs.settings.shapes import MOST_ROWS

OBSERVED_TOKENS = 32  # at a prompt's end, whose attention decides which of its pages stay


@dataclasses.dataclass(frozen=True)
class RequestConfig(Section):
    """Features of requests that an engine is built with; it rejects a request for another one."""

    path: ClassVar[str] = "engine.requests"

    top_logprobs: int = setting(
        0, "Alternatives reported for each sampled or scored token.", lower=0, upper=MOST_ROWS
    )
    prompt_budgets: bool = setting(
        False, "Requests may limit how many pages of their prompts stay cached (SnapKV)."
    )
    penalties: bool = setting(
        False, "Steps count tokens, for repetition, presence and frequency penalties."
    )
    grammars: bool = setting(
        False, "Requests may restrict by a grammar which tokens follow each other."
    )
    embeddings: bool = setting(
        False, "Requests may ask for a vector of their prompts instead of tokens."
    )
    classifier_tokens: str | None = setting(
        None,
        "Tokens with which a language model answers whether a document is relevant: one ('Yes'), "
        "or two with the relevant one last ('no,yes'). Its scores then come from their logits.",
        host_only=True,
    )
