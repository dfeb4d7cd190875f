"""The loss of a model on windows of text, with one layer in memory at a time."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs.model import ModelConfig
from inference.layerwise.reader import Reader
from inference.layerwise.stream import Stream
from layers import decoder, norm, params
from layers.params import Params

TOKENS = 4096  # that a loss is of, about

_ROWS = 8192  # of the head, that are multiplied together
_WINDOW_TOKENS = 512  # whose logits with these are there together, about


def spread(tokens_YW: np.ndarray) -> np.ndarray:
    """Returns so many of all windows as have `TOKENS`, evenly spread."""
    count = max(min(len(tokens_YW), TOKENS // tokens_YW.shape[1]), 1)
    return tokens_YW[np.linspace(0, len(tokens_YW) - 1, count).round().astype(int)]


def of_model(reader: Reader, tokens_YW: np.ndarray) -> float:
    """Returns nats a token that a model loses on windows of ids."""
    ids, places = np.unique(tokens_YW, return_inverse=True)
    stream = Stream(reader.config, reader.embedding(ids), places.reshape(tokens_YW.shape))
    for index in range(reader.config.num_layers):
        stream.advance(index, reader.layer(index))
    return of_stream(reader, stream, tokens_YW)


def of_stream(reader: Reader, stream: Stream, tokens_YW: np.ndarray) -> float:
    """Returns nats a token behind the last layer, of windows of ids in a stream's order."""
    config = reader.config
    tables = {path: reader.whole(path) for path in reader.infos if path.startswith("final_norm")}
    declared = {name: info for name, info in config.parameters().items() if name == "final_norm"}
    final_norm = params.unflatten(declared, tables).get("final_norm") if tables else None
    hidden = [_normed(stream.hidden(nth), final_norm, config=config)
              for nth in range(stream.num_batches)]  # fmt: skip
    hidden_YWD = np.concatenate([np.asarray(batch) for batch in hidden])
    hidden_TD = hidden_YWD[:, :-1].reshape(-1, config.width)
    labels_T = tokens_YW[:, 1:].reshape(-1)
    highest_T = np.full(len(labels_T), -np.inf)
    total_T, label_T = np.zeros(len(labels_T)), np.zeros(len(labels_T))
    for start, head in _heads(reader):
        for first in range(0, len(labels_T), _WINDOW_TOKENS):
            some = slice(first, first + _WINDOW_TOKENS)
            logits_TV = np.asarray(_logits(head, hidden_TD[some], config=config), np.float64)
            highest = np.maximum(highest_T[some], logits_TV.max(1))
            total_T[some] *= np.exp(highest_T[some] - highest)
            total_T[some] += np.exp(logits_TV - highest[:, None]).sum(1)
            highest_T[some] = highest
            inside = (labels_T[some] >= start) & (labels_T[some] < start + logits_TV.shape[1])
            rows = np.flatnonzero(inside)
            label_T[first + rows] = logits_TV[rows, labels_T[some][rows] - start]
    return float(np.mean(highest_T + np.log(total_T) - label_T))


def _heads(reader: Reader) -> Iterator[tuple[int, Params]]:
    """Yields the head some rows at a time: the first row, and its parameters."""
    config = reader.config
    name = "embed" if config.tied else "head"
    bias = reader.whole("head/table_bias") if config.has_head_bias else None
    start = 0
    for block in reader.blocks(f"{name}/table"):
        for first in range(0, len(block), _ROWS):
            rows = block[first : first + _ROWS]
            head: dict[str, dict[str, np.ndarray]] = {name: {"table": rows}}
            if bias is not None:
                of_rows = {"table_bias": bias[start : start + len(rows)]}
                head["head"] = head.get("head", {}) | of_rows
            yield start, head
            start += len(rows)


@functools.partial(jax.jit, static_argnames="config")
def _normed(x_YWD: jax.Array, final_norm: Any, *, config: ModelConfig) -> jax.Array:
    x_TD = x_YWD.reshape(-1, config.width)
    normed_TD = norm.of_sum(x_TD, None, final_norm, config)[0]
    return normed_TD.reshape(x_YWD.shape).astype(jnp.float32)


@functools.partial(jax.jit, static_argnames="config")
def _logits(head: Params, hidden_TD: jax.Array, *, config: ModelConfig) -> jax.Array:
    return decoder.logits(head, config, hidden_TD)
