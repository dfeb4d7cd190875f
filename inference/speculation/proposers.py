"""Which proposer an engine has."""

from configs import heads
from configs.engine import Config
from inference.speculation.draft_model import DraftModel
from inference.speculation.eagle import Eagle
from inference.speculation.medusa import Medusa
from inference.speculation.ngram import NGram
from inference.speculation.own_pages import OwnPages
from inference.speculation.proposer import Proposer


def of(config: Config, attention: str = "reference") -> Proposer | None:
    """The one that `engine.drafts.proposer` names, if any.

    Args:
        config: of the engine.
        attention: the implementation that its cache is laid out for, where it is to propose.
    """
    settings, max_seqs, draft = config.engine.drafts, config.engine.max_seqs, config.draft
    if settings.proposer == "ngram":
        return NGram(max_seqs, config.max_context)
    if isinstance(draft, heads.Medusa):
        return Medusa(draft, settings, max_seqs)
    if draft is None:
        return None
    pages = OwnPages(draft, config.cached_model)
    if isinstance(draft, heads.Eagle):
        return Eagle(draft, config.chip_model, pages, settings, max_seqs, attention)
    return DraftModel(draft, pages, attention)
