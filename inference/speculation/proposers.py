"""Which proposer an engine has."""

from typing import cast

import jax

from configs import heads
from configs.engine import Config
from inference.speculation.draft_model import DraftModel
from inference.speculation.eagle import Eagle
from inference.speculation.medusa import Medusa
from inference.speculation.ngram import NGram
from inference.speculation.own_pages import OwnPages
from inference.speculation.proposer import Proposer, State


def of(config: Config, attention: str = "reference") -> Proposer[State] | None:
    """The one that `engine.drafts.proposer` names, if any.

    Args:
        config: of the engine.
        attention: the implementation that its cache is laid out for, where it is to propose.
    """
    settings, max_seqs, draft = config.engine.drafts, config.engine.max_seqs, config.draft
    proposer: Proposer[jax.Array] | Proposer[tuple[()]] | None = None
    if settings.proposer == "ngram":
        proposer = NGram(max_seqs, config.max_context)
    elif isinstance(draft, heads.Medusa):
        proposer = Medusa(draft, settings, max_seqs)
    elif draft is not None:
        pages = OwnPages(draft, config.cached_model)
        if isinstance(draft, heads.Eagle):
            proposer = Eagle(draft, config.chip_model, pages, settings, max_seqs, attention)
        else:
            proposer = DraftModel(draft, pages, attention)
    return cast("Proposer[State] | None", proposer)  # each gets states of its own alone
