"""Which proposer an engine has."""

from typing import cast

import jax

from configs import heads
from configs.engine import Config
from inference.speculation.dflash import DFlashProposer
from inference.speculation.draft_model import DraftModelProposer
from inference.speculation.eagle import EagleProposer
from inference.speculation.medusa import MedusaProposer
from inference.speculation.ngram import NGramProposer
from inference.speculation.own_pages import OwnPages
from inference.speculation.proposer import Proposer, State
from inference.speculation.suffix import SuffixProposer, SuffixState


def of(config: Config, attention: str = "reference") -> Proposer[State] | None:
    """The one that `engine.drafts.proposer` names, if any; to propose, it needs the implementation
    of `attention` that the cache is laid out for.
    """
    settings, max_seqs, draft = config.engine.drafts, config.engine.max_seqs, config.draft
    proposer: Proposer[jax.Array] | Proposer[SuffixState] | Proposer[tuple[()]] | None = None
    if settings.proposer == "ngram":
        proposer = NGramProposer(max_seqs, config.max_context)
    elif settings.proposer == "suffix":
        proposer = SuffixProposer(max_seqs, config.max_context)
    elif isinstance(draft, heads.Medusa):
        proposer = MedusaProposer(draft, settings, max_seqs)
    elif draft is not None:
        pages = OwnPages(draft, config.cached_model)
        if isinstance(draft, heads.Eagle):
            proposer = EagleProposer(draft, config.chip_model, pages, settings, max_seqs, attention)
        elif isinstance(draft, heads.DFlash):
            proposer = DFlashProposer(draft, config.chip_model, pages, attention)
        else:
            proposer = DraftModelProposer(draft, pages, attention)
    return cast("Proposer[State] | None", proposer)  # each gets states of its own alone
