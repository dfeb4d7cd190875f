"""Prompts of a query and a document, for models that score how well the two fit."""

import re
import types
from collections.abc import Mapping

from configs.errors import InputError
from inference.classifier import Classifier
from inference.text.tokenizer import Tokenizer

_ROLES = "query", "document"


def has_pairs(template: str | None) -> bool:
    """Returns whether a chat template writes messages of the roles "query" and "document"."""
    return template is not None and all(re.search(rf"(['\"]){role}\1", template) for role in _ROLES)


def check(template: str | None, classifier: Classifier | None) -> None:
    """Raises an `InputError` if scores of pairs would mean nothing."""
    if classifier is not None:
        classifier.check_scores(has_pairs(template))
    elif has_pairs(template):
        raise InputError(
            "the chat template asks the model about a query and a document: name the tokens that "
            "it answers with in engine.requests.classifier_tokens"
        )


def encode(
    tokenizer: Tokenizer,
    query: str,
    document: str,
    variables: Mapping[str, object] = types.MappingProxyType({}),
) -> list[int]:
    """Returns token ids of a pair: by a chat template for pairs, otherwise as the tokenizer joins
    two texts.

    Args:
        variables: of the template, such as an instruction.

    Raises:
        InputError: as `Tokenizer.apply_chat_template` and `Tokenizer.encode`.
    """
    if not has_pairs(tokenizer.template):
        return tokenizer.encode_pair(query, document)
    contents = zip(_ROLES, (query, document), strict=True)
    messages = [{"role": role, "content": content} for role, content in contents]
    tokens = tokenizer.apply_chat_template(messages, False, variables=variables)
    start = tokenizer.encode("a")[:1]  # published templates leave the start token to the tokenizer
    has_start = tokenizer.bos_id is None or start != [tokenizer.bos_id] or tokens[:1] == start
    return tokens if has_start else start + tokens
