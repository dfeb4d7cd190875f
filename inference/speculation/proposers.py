"""Which proposer an engine has."""

from configs.engine import Config
from inference.speculation.draft_model import DraftModel
from inference.speculation.eagle import Eagle
from inference.speculation.medusa import Medusa
from inference.speculation.ngram import NGram
from inference.speculation.proposer import Proposer


def of(config: Config, attention: str = "reference") -> Proposer | None:
    """The one that `engine.drafts.proposer` names, if any.

    Args:
        config: of the engine.
        attention: the implementation that its cache is laid out for, where it is to propose.
    """
    match config.engine.drafts.proposer:
        case "ngram":
            return NGram(config)
        case "draft":
            return DraftModel(config, attention)
        case "medusa":
            return Medusa(config)
        case "eagle":
            return Eagle(config, attention)
    return None
