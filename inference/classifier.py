"""Heads over the hidden state of a text's last token: labels of a classifier, scores of a reranker.

The host computes them from the vector that a step returns, in float64 and one order of sums. So
labels depend on that vector alone; steps, parameters and plans are those of the model without it.
"""

import dataclasses
import functools
from typing import Literal

import numpy as np

from configs.errors import InputError

Activation = Literal["softmax", "sigmoid", "identity"]
_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class Classifier:
    """A linear head. Its numbers are bytes, so that messages between processes carry it.

    Attributes:
        weight, bias: little-endian f32[L, D] and f32[L].
        labels: names of the L labels.
        activation: makes probabilities of logits.
        score_activation: makes the score of a pair of texts of the one logit.
        pad_id: a token that the end of a text is read without, as transformers does.
        is_of_tokens: rows are those of tokens in the head of a language model, which needs a
            prompt that it answers with one of them.
    """

    weight: bytes
    bias: bytes
    labels: tuple[str, ...]
    activation: Activation = "softmax"
    score_activation: Activation = "sigmoid"
    pad_id: int | None = None
    is_of_tokens: bool = False

    @functools.cached_property
    def _weight_LD(self) -> np.ndarray:
        weight_X = np.frombuffer(self.weight, "<f4").astype(np.float64)
        return weight_X.reshape(len(self.labels), -1)

    def logits(self, hidden_D: np.ndarray) -> np.ndarray:
        """Returns a text's logits, f32[L], of the hidden state of its last token."""
        logits_L = (self._weight_LD * hidden_D).sum(1) + np.frombuffer(self.bias, "<f4")
        return logits_L.astype(np.float32)

    def probabilities(self, logits_L: np.ndarray) -> np.ndarray:
        """Returns the labels' probabilities, f32[L]; of a regression the logits themselves."""
        return _activated(logits_L, self.activation)

    def score(self, logits_L: np.ndarray, is_activated: bool = True) -> float:
        """Returns the score of a pair of texts; the logit itself unless `is_activated`."""
        activation = self.score_activation if is_activated else "identity"
        return float(_activated(logits_L, activation)[0])

    def check_scores(self, has_pairs: bool) -> None:
        """Raises an `InputError` if pairs of texts have no score.

        Args:
            has_pairs: the chat template writes prompts of a query and a document.
        """
        if len(self.labels) > 1:
            names = ", ".join(self.labels[:_SHOWN])
            raise InputError(
                f"a score is that of one label, and this classifier has {len(self.labels)} "
                f"({names}{', ...' if len(self.labels) > _SHOWN else ''}): classify texts instead"
            )
        if self.is_of_tokens and not has_pairs:
            raise InputError(
                "this model answers a prompt that its chat template does not write: give one with "
                'messages of the roles "query" and "document" (--chat_template)'
            )

    def read_part(self, tokens: list[int]) -> list[int]:
        """Returns the tokens without those at the end that only fill up."""
        end = len(tokens)
        while end > 1 and tokens[end - 1] == self.pad_id:
            end -= 1
        return tokens[:end]


def similarity(first_D: np.ndarray, second_D: np.ndarray) -> float:
    """Returns the cosine of the angle between two vectors; 0 if one has no direction."""
    first_D, second_D = first_D.astype(np.float64), second_D.astype(np.float64)
    length = np.linalg.norm(first_D) * np.linalg.norm(second_D)
    return float((first_D * second_D).sum() / length) if length else 0.0


def _activated(logits_L: np.ndarray, activation: Activation) -> np.ndarray:
    logits_L = logits_L.astype(np.float64)
    if activation == "softmax":
        powers_L = np.exp(logits_L - logits_L.max())
        logits_L = powers_L / powers_L.sum()
    elif activation == "sigmoid":
        logits_L = 0.5 * (1 + np.tanh(0.5 * logits_L))  # overflows nowhere
    return logits_L.astype(np.float32)
