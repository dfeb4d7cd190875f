"""What training makes small. A loss is a function (params, frozen, batch) -> float32 scalar: the
mean over a batch's rows, so that parts of a batch may be averaged.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from configs import heads
from configs.model import ModelConfig
from inference.speculation import eagle as eagle_heads
from inference.speculation import medusa as medusa_heads
from inference.training.loop import Loss
from layers import decoder, params, ragged
from layers.linear import linear
from layers.params import Params
from layers.ragged import Ragged
from layers.registry import RoutedTokens

# (what is trained, frozen) -> the parameters that the decoder computes with.
Model = Callable[[Params, object], Params]

_BLOCK_ROWS = 2048  # whose logits are held at a time, 32 MiB of a vocabulary of 4,096
_PASSES = 3  # of an EAGLE head
_DECAY = 0.8  # of the weight of each later draft
_BALANCE = 0.01  # of uneven routing in addition to the cross-entropy
_REGRESSION = 10.0  # weight of the distance between states; it has some hundredths of their spread


def next_token(config: ModelConfig) -> Loss:
    """The mean cross-entropy, in nats, of each token given those before it in its window; of
    mixtures with `_BALANCE` times how unevenly tokens are routed to their experts (`unevenness`).

    Parameters are float32 masters; the decoder that serves computes with them in their declared
    formats. A batch is {"tokens": i32[Y, W + 1]}.
    """
    model = whole(config)

    def loss(masters: Params, frozen: None, batch: dict[str, jax.Array]) -> jax.Array:
        values = model(masters, frozen)
        inputs_YW, targets_YW = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        rows = ragged.contiguous(*inputs_YW.shape)
        hidden_YWD, unbalanced = hidden_states(values, config, inputs_YW, rows)
        logits = functools.partial(decoder.logits, values, config)
        return cross_entropy(logits, hidden_YWD, targets_YW) + unbalanced

    return loss


def whole(config: ModelConfig) -> Model:
    """All of a model is trained: of its float32 masters, parameters in their declared formats."""
    infos = decoder.param_infos(config)

    def stored(masters: Params, frozen: object) -> Params:
        values: Params = jax.tree.map(
            lambda info, x: x.astype(info.format), infos, masters, is_leaf=params.is_info
        )
        return values

    return stored


def hidden_states(
    values: Params, config: ModelConfig, inputs_YW: jax.Array, rows: Ragged
) -> tuple[jax.Array, jax.Array | float]:
    """Last hidden states of rows without a cache, float32 [Y, W, D]; and of mixtures what their
    uneven routing costs, of others 0.
    """
    output = layers_output(values, config, inputs_YW, rows)
    unbalanced = 0.0 if output.routed is None else _BALANCE * unevenness(output.routed)
    return output.hidden_TD.reshape(*inputs_YW.shape, -1), unbalanced


def layers_output(
    values: Params,
    config: ModelConfig,
    inputs_YW: jax.Array,
    rows: Ragged,
    features: tuple[int, ...] = (),
) -> decoder.LayersOutput:
    """`decoder.layers` of embedded rows without a cache."""
    tokens_T = inputs_YW.reshape(-1)
    x_TD = decoder.embedded(values, config, tokens_T, rows)
    return decoder.layers(values, config, x_TD, rows, tokens_T=tokens_T, features=features)


def unevenness(routed: RoutedTokens) -> jax.Array:
    """E times the sum over experts of the share of tokens and the mean score of each, less 1: 0
    where all get equally many (Fedus et al. 2021, arXiv 2101.03961, equation 4). Without it a few
    experts get most tokens, and so learn the most, and get more.
    """
    share_LE = routed.num_tokens / routed.num_tokens.sum(1, keepdims=True)
    return (share_LE.shape[1] * (share_LE * routed.share).sum(1) - 1).mean()


def eagle(target: ModelConfig, head_config: heads.Eagle) -> Loss:
    """What EAGLE heads are trained on: `_PASSES` times the target's distribution of the next token,
    first given its states, then those of the pass before, as drafting meets them (EAGLE-3's
    training-time test, Li et al. 2025, arXiv 2503.01840; here a pass attends to its own entries).

    Heads without fused features also learn the target's next state (Li et al. 2024, arXiv
    2401.15077). Frozen are the target's parameters; a batch is that of `next_token`.
    """

    def loss(masters: Params, frozen: Params, batch: dict[str, jax.Array]) -> jax.Array:
        inputs_YW = batch["tokens"][:, :-1]
        rows = ragged.contiguous(*inputs_YW.shape)
        embedded_TD, hidden_TD, features = _target_states(
            frozen, target, inputs_YW, rows, head_config.features
        )
        state_TD = eagle_heads.fused(masters, head_config, hidden_TD, features)
        total, target_YWD = jnp.float32(0), hidden_TD.reshape(*inputs_YW.shape, -1)
        for nth in range(_PASSES):
            state_YWD = state_TD.reshape(*inputs_YW.shape, -1)
            before_YWD = jnp.pad(state_YWD[:, :-1], ((0, 0), (1, 0), (0, 0)))
            before_TD = before_YWD.reshape(state_TD.shape)
            x_TD, _ = eagle_heads.inputs(
                masters, head_config, embedded_TD, before_TD, rows.position_T
            )
            state_TD = decoder.layers(masters, head_config, x_TD, rows).hidden_TD
            states_YWD = state_TD.reshape(*inputs_YW.shape, -1)[:, nth:]
            lost = _unlike(masters, head_config, states_YWD, frozen, target, target_YWD[:, nth:])
            if not head_config.features:
                lost += _REGRESSION * optax.huber_loss(state_TD, hidden_TD).mean()
            total += lost * _DECAY**nth
        return total

    return loss


def medusa(target: ModelConfig, head_config: heads.Medusa) -> Loss:
    """What Medusa heads are trained on: the n-th, from 0, predicts the target's distribution of the
    token n + 2 positions behind its state (Cai et al. 2024, arXiv 2401.10774). Frozen are the
    target's parameters; a batch is that of `next_token`.
    """

    def loss(masters: Params, frozen: Params, batch: dict[str, jax.Array]) -> jax.Array:
        inputs_YW = batch["tokens"][:, :-1]
        rows = ragged.contiguous(*inputs_YW.shape)
        _, hidden_TD, _ = _target_states(frozen, target, inputs_YW, rows, ())
        total, target_YWD = jnp.float32(0), hidden_TD.reshape(*inputs_YW.shape, -1)
        for nth, weight in enumerate(masters["blocks"]):
            states_YWD = medusa_heads.block(weight, hidden_TD).reshape(*inputs_YW.shape, -1)
            before_YWD, after_YWD = states_YWD[:, : -1 - nth], target_YWD[:, 1 + nth :]
            lost = _unlike(masters, head_config, before_YWD, frozen, target, after_YWD)
            total += _DECAY**nth * lost
        return total

    return loss


def _unlike(
    masters: Params,
    head_config: heads.Heads,
    states_YWD: jax.Array,
    frozen: Params,
    target: ModelConfig,
    target_YWD: jax.Array,
) -> jax.Array:
    """Mean cross-entropy of a head's distribution and the target's, among the tokens that are
    proposed: what the target might have said teaches more than what it said.
    """
    rows = np.array(head_config.proposed_ids or range(head_config.vocab_size))
    proposed = frozen | {
        part: {name: values[rows] for name, values in frozen[part].items()}
        for part in ("embed", "head")
        if part in frozen
    }

    def lose(states_QD: jax.Array, target_QD: jax.Array) -> jax.Array:
        target_QV = jax.nn.softmax(decoder.logits(proposed, target, target_QD))
        logits_QV = linear(states_QD, masters["head"]["table"])
        return jax.nn.logsumexp(logits_QV, axis=1) - (target_QV * logits_QV).sum(1)

    return mean(lose, states_YWD, target_YWD)


def _target_states(
    frozen: Params,
    target: ModelConfig,
    inputs_YW: jax.Array,
    rows: Ragged,
    features: tuple[int, ...],
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
    """What a target makes of tokens: embedded, last hidden states, features."""
    tokens_T = inputs_YW.reshape(-1)
    embedded_TD = decoder.embedded(frozen, target, tokens_T, rows)
    hidden_TD, features_taken, _, _ = decoder.layers(
        frozen, target, embedded_TD, rows, tokens_T=tokens_T, features=features
    )
    return jax.lax.stop_gradient((embedded_TD, hidden_TD, features_taken))


def cross_entropy(
    logits: Callable[[jax.Array], jax.Array], hidden_YWD: jax.Array, targets_YW: jax.Array
) -> jax.Array:
    """Mean negative log-probability of the targets, float32."""
    return mean(functools.partial(negative_logprobs, logits), hidden_YWD, targets_YW)


def negative_logprobs(
    logits: Callable[[jax.Array], jax.Array], hidden_QD: jax.Array, target_Q: jax.Array
) -> jax.Array:
    """Of each target, float32 [Q]."""
    logits_QV = logits(hidden_QD)
    of_target_Q = jnp.take_along_axis(logits_QV, target_Q[:, None], axis=1)
    return jax.nn.logsumexp(logits_QV, axis=1) - of_target_Q[:, 0]


def mean(lose: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """Mean over all positions of arrays [Y, W, ...], as `row_sums`."""
    Y, W = arrays[0].shape[:2]
    return row_sums(lose, *arrays).sum() / (Y * W)


def row_sums(lose: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """Sums over each row's positions of arrays [Y, W, ...], float32 [Y].

    What is lost is computed for a block of each window's positions at a time, and again on the way
    back, so that no more than `_BLOCK_ROWS` rows of logits (or one position of each window) are
    ever held.
    """
    Y, W = arrays[0].shape[:2]
    largest = max(_BLOCK_ROWS // Y, 1)
    block = next(size for size in range(min(largest, W), 0, -1) if W % size == 0)

    @jax.checkpoint
    def add(total_Y: jax.Array, part: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        lost_Q = lose(*(x.reshape(-1, *x.shape[2:]) for x in part))
        return total_Y + lost_Q.reshape(Y, block).sum(1), None

    blocks = tuple(x.reshape(Y, W // block, block, *x.shape[2:]).swapaxes(0, 1) for x in arrays)
    total_Y, _ = jax.lax.scan(add, jnp.zeros(Y, jnp.float32), blocks)
    return total_Y
