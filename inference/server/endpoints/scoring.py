"""POST /v1/score and /v1/rerank: how well texts fit, by a classifier or by vectors."""

import secrets
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from starlette.responses import Response

from configs.errors import InputError
from inference.classifier import Classifier, similarity
from inference.server.endpoints import pooled
from inference.server.endpoints.envelope import whole
from inference.server.frames import Loaded
from inference.server.protocol import sampling, tools
from inference.server.protocol.caller import Caller
from inference.server.protocol.embeddings import PooledUsage
from inference.server.protocol.errors import ApiError, invalid, missing, unusable
from inference.server.protocol.scoring import (
    Document,
    PairRequest,
    Reranked,
    RerankedDocument,
    RerankRequest,
    Score,
    ScoreRequest,
    Scores,
)
from inference.server.service import Service
from inference.text import pairs, template_worker


class _Pairs(NamedTuple):
    """Texts that are scored, a pair each, and the fields that hold them."""

    firsts: list[str]
    seconds: list[str]
    fields: tuple[str, str]


async def score(service: Service, request: ScoreRequest, caller: Caller) -> Response:
    """Score pairs of texts by how well they fit.

    Raises:
        ApiError: a field is wrong, or the engine cannot answer.
    """
    for name in ("text_1", "text_2"):
        if getattr(request, name) is None:
            raise missing(name)
    firsts, seconds = _listed(request.text_1), _listed(request.text_2)
    if len(firsts) not in (1, len(seconds)):
        raise invalid(
            "text_1", f"holds {len(firsts)} texts, and text_2 {len(seconds)}: it is one text, or "
            "one for each of the others",
        )  # fmt: skip
    scores, usage = await _scores(
        service, request, _Pairs(firsts, seconds, ("text_1", "text_2")), caller
    )
    data = [Score(index, value) for index, value in enumerate(scores)]
    id = f"score-{secrets.token_hex(14)}"
    return whole(Scores(id, int(time.time()), request.model or service.model_name, data, usage))


async def rerank(service: Service, request: RerankRequest, caller: Caller) -> Response:
    """Order documents by their relevance to a query, best first.

    Raises:
        ApiError: a field is wrong, or the engine cannot answer.
    """
    documents = _listed(request.documents)
    scores, usage = await _scores(
        service, request, _Pairs([request.query], documents, ("query", "documents")), caller
    )
    results = [RerankedDocument(index, value) for index, value in enumerate(scores)]
    results = sorted(results, key=lambda result: result.relevance_score, reverse=True)
    results = results[: request.top_n or None]
    if request.return_documents is not False:
        for result in results:
            result.document = Document(documents[result.index])
    id = f"rerank-{secrets.token_hex(14)}"
    return whole(Reranked(id, request.model or service.model_name, results, usage))


def _listed(texts: str | Sequence[str | Document] | None) -> list[str]:
    listed = [texts] if isinstance(texts, str) else texts or []
    return [text if isinstance(text, str) else text.text for text in listed]


async def _scores(
    service: Service, request: PairRequest, texts: _Pairs, caller: Caller
) -> tuple[list[float], PooledUsage]:
    facts = pooled.check(service, request, caller)
    template, classifier = service.texts.tokenizer.template, facts.classifier
    try:
        pairs.check(template, classifier)
    except InputError as error:
        raise ApiError(400, str(error), code="unsupported") from None
    _check_variables(request, template)
    async with caller.deadline.enforce():
        texts = await _shortened(service, request, texts)
        if classifier is None:
            prompts = await _alone(service, request, texts, facts)
        else:
            prompts = await _joined(service, request, texts, facts)
            prompts = [classifier.read_part(tokens) for tokens in prompts]
    assert facts.pooling is not None
    pooling = facts.pooling if classifier is None else "last"
    data = await pooled.vectors(service, request, prompts, pooling, caller)
    vectors = [np.frombuffer(values, "<f4") for values in data]
    return _values(request, texts, classifier, vectors), PooledUsage.of(prompts)


def _values(
    request: PairRequest, texts: _Pairs, classifier: Classifier | None, vectors: list[np.ndarray]
) -> list[float]:
    if classifier is not None:
        is_activated = request.use_activation is not False
        return [classifier.score(classifier.logits(v_D), is_activated) for v_D in vectors]
    firsts, seconds = vectors[: len(texts.firsts)], vectors[len(texts.firsts) :]
    firsts *= len(seconds) // len(firsts)
    return [similarity(*pair) for pair in zip(firsts, seconds, strict=True)]


def _check_variables(request: PairRequest, template: str | None) -> None:
    """Raises an `ApiError` (400) for variables that no template for pairs reads."""
    tools.check_variables(request.chat_template_kwargs)
    unread = "not read by this model's chat template"
    if request.chat_template_kwargs and not pairs.has_pairs(template):
        raise invalid("chat_template_kwargs", f"are {unread}", "unsupported")
    if request.instruction is not None and not (
        pairs.has_pairs(template) and "instruction" in template_worker.variables(template or "")
    ):
        raise invalid("instruction", f"is {unread}", "unsupported")


async def _shortened(service: Service, request: PairRequest, texts: _Pairs) -> _Pairs:
    """Cuts texts to `max_tokens_per_query` and `max_tokens_per_doc`."""
    limits = request.max_tokens_per_query, request.max_tokens_per_doc
    firsts, seconds = [
        [await _cut(service, text, limit, field) for text in listed] if limit else listed
        for listed, limit, field in zip(texts[:2], limits, texts.fields, strict=True)
    ]
    return texts._replace(firsts=firsts, seconds=seconds)


async def _cut(service: Service, text: str, limit: int, field: str) -> str:
    """The first tokens of a text, as a text."""
    tokens = await service.texts.encode(text, field, add_special=False)
    return text if len(tokens) <= limit else await service.texts.decode(tokens[:limit])


async def _alone(
    service: Service, request: PairRequest, texts: _Pairs, facts: Loaded
) -> list[list[int]]:
    """Tokens of each text, those of the first field first."""
    prompts = []
    for listed, field in zip(texts[:2], texts.fields, strict=True):
        for index, text in enumerate(listed):
            tokens = await service.texts.encode(text, field)
            prompts.append(pooled.fit(request, tokens, facts, field, f"text {index}"))
    return prompts


async def _joined(
    service: Service, request: PairRequest, texts: _Pairs, facts: Loaded
) -> list[list[int]]:
    """Tokens of each pair."""
    prompts, field = [], texts.fields[1]
    firsts = texts.firsts * (len(texts.seconds) // len(texts.firsts))
    for index, pair in enumerate(zip(firsts, texts.seconds, strict=True)):
        tokens = await _pair(service, request, *pair, field)
        prompts.append(pooled.fit(request, tokens, facts, field, f"pair {index}"))
    return prompts


async def _pair(
    service: Service, request: PairRequest, first: str, second: str, field: str
) -> list[int]:
    """Tokens of a pair. A template asks its question behind the texts, so the second text alone is
    cut there.
    """
    texts, limit = service.texts, request.truncate_prompt_tokens
    variables: dict[str, object] = dict(request.chat_template_kwargs or {})
    if request.instruction is not None:
        variables.setdefault("instruction", request.instruction)
    tokens = await texts.encode_pair(first, second, variables, field)
    if not limit or not pairs.has_pairs(texts.tokenizer.template):
        return tokens
    limit = service.facts.max_context if limit == -1 else limit
    document = await texts.encode(second, field, add_special=False)
    count, side = len(document), request.truncation_side or "right"
    while len(tokens) > limit:
        count -= len(tokens) - limit
        if count < 1:
            why = f"{limit} tokens hold the prompt of no pair in {field}"
            raise unusable("truncate_prompt_tokens", why)
        second = await texts.decode(sampling.cut(document, count, count, side))
        tokens = await texts.encode_pair(first, second, variables, field)
    return tokens
