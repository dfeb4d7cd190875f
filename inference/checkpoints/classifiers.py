"""The head with which a checkpoint classifies texts: its own, or rows of its head for tokens."""

import numpy as np

from configs.errors import InputError, shown
from inference.checkpoints import load
from inference.checkpoints.checkpoint import Checkpoint
from inference.classifier import Classifier
from inference.text.tokenizer import Tokenizer
from layers import params

_SETTING = "engine.requests.classifier_tokens"


def of_checkpoint(
    checkpoint: Checkpoint, tokenizer: Tokenizer | None, tokens: str | None
) -> Classifier | None:
    """Returns a checkpoint's classifier; None: it has none, and no tokens stand for labels.

    Args:
        tokens: the setting `classifier_tokens`.

    Raises:
        InputError: the tokens are none of the model's, or its head for them is not linear.
    """
    if tokens is None:
        return checkpoint.classifier
    label = f"{_SETTING}={tokens}"
    if checkpoint.classifier is not None:
        raise InputError(f"{label}: this model is a classifier already; leave it out")
    if tokenizer is None:
        raise InputError(f"{label}: this model has no tokenizer, so tokens have no names")
    if checkpoint.config.logit_cap is not None:
        raise InputError(f"{label}: this model caps its logits, so no row gives a token's logit")
    names = tokens.split(",")
    if not 1 <= len(names) <= 2:
        raise InputError(f"{label}: must be one token, or two such as no,yes")
    ids = [_id(tokenizer, name, label) for name in names]
    rows_LD, bias_L = _rows(checkpoint, ids)
    if len(ids) == 2:  # a softmax over two logits is the sigmoid of their difference
        rows_LD, bias_L = rows_LD[1:] - rows_LD[:1], bias_L[1:] - bias_L[:1]
    weight, bias = (np.asarray(values, "<f4").tobytes() for values in (rows_LD, bias_L))
    return Classifier(weight, bias, (names[-1],), "sigmoid", is_of_tokens=True)


def _id(tokenizer: Tokenizer, name: str, label: str) -> int:
    id = tokenizer.token_id(name)
    if id is None:
        raise InputError(f"{label}: {shown(name)} is no token of this model")
    return id


def _rows(checkpoint: Checkpoint, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """What the head multiplies a hidden state with, and adds, for some tokens' logits."""
    config, contents = checkpoint.config, checkpoint.contents()
    table = "embed/table" if config.tied else "head/table"
    declared = params.flatten(config.parameters())

    def rows(path: str) -> np.ndarray:
        stored = load.StoredParameter(
            contents.source.verified(), contents.name_map(path), declared[path]
        )
        parts = [np.asarray(stored[id : id + 1], np.float32) for id in ids]
        return np.concatenate(parts) * np.float32(config.logit_scale)

    bias_L = rows("head/table_bias") if config.has_head_bias else np.zeros(len(ids), np.float32)
    return rows(table), bias_L
