"""Bodies of POST /v1/score and of Jina's and Cohere's /v1/rerank, as vLLM has them."""

from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from inference.server.protocol.embeddings import MAX_INPUTS, PooledRequest, PooledUsage
from inference.server.protocol.fields import Short, Tokens
from inference.server.protocol.tool_fields import Variables

_Text = Annotated[str, Meta(min_length=1)]
_Texts = Annotated[list[_Text], Meta(min_length=1, max_length=MAX_INPUTS)]


class PairRequest(PooledRequest, kw_only=True):
    """Fields of scores of pairs. null stands for the default everywhere.

    Attributes:
        use_activation: scores of a classifier are probabilities (the default), or else logits.
        max_tokens_per_query, max_tokens_per_doc: texts are cut after so many tokens; 0: they are
            not.
        instruction: a variable of the chat template for pairs, which has to read it.
        chat_template_kwargs: further variables of it.
    """

    use_activation: bool | None = None
    max_tokens_per_query: Tokens | None = None
    max_tokens_per_doc: Tokens | None = None
    instruction: Short | None = None
    chat_template_kwargs: Variables | None = None


class ScoreRequest(PairRequest, kw_only=True):
    """POST /v1/score.

    Attributes:
        text_1: one text, or as many as there are others.
        text_2: texts that are scored with it.
    """

    text_1: _Text | _Texts | None = None
    text_2: _Text | _Texts | None = None


class Document(Struct):
    """A document as an object; the other fields have no effect."""

    text: _Text


class RerankRequest(PairRequest, kw_only=True):
    """POST /v1/rerank.

    Attributes:
        top_n: results at most, the best ones; 0: all.
        return_documents: results have their documents (the default).
    """

    query: _Text
    documents: Annotated[list[_Text | Document], Meta(min_length=1, max_length=MAX_INPUTS)]
    top_n: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    return_documents: bool | None = None


class Score(Struct):
    """The score of one pair."""

    index: int
    score: float
    object: str = "score"


class Scores(Struct):
    """Scores, in the order of the pairs."""

    id: str
    created: int
    model: str
    data: list[Score]
    usage: PooledUsage
    object: str = "list"


class RerankedDocument(Struct):
    """A document by its place in the request, and its score."""

    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class Reranked(Struct):
    """Documents, best first."""

    id: str
    model: str
    results: list[RerankedDocument]
    usage: PooledUsage
