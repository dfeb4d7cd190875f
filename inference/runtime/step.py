"""The step: one pure function serves prefill, decode, verification and scoring.

    cache, slots, output = step(params, cache, slots, batch)

What the next step needs from this one stays on the device in `SlotState`, one row a running
sequence and a sink row for padding. Phases differ only in data. `StepShape`
is static; it is all that differs between the programs of an engine.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from configs import adapters
from configs.engine import Config
from configs.settings.adapters import NO_SLOT
from configs.settings.shapes import MIN_DETERMINISTIC_ROWS
from inference.runtime import accepted_path, adapter_stacks, packed_output
from inference.runtime.accepted_path import AcceptedPath
from inference.runtime.batch import Admissions, Batch
from inference.runtime.packed_output import PackedOutput
from inference.sampling import parameters, prompt_results, sampler
from inference.sampling.parameters import SlotSampling
from inference.scheduling.step_output import StepOutput
from inference.scheduling.step_shapes import StepShape
from inference.speculation import draft_tree, proposers
from inference.speculation.acceptance import coupled, rejection, trees
from inference.speculation.proposer import DraftInputs, Drafts, SampledStep, State
from layers import decoder, kv_cache, topk
from layers.kernels.linear import adapted
from layers.kv_cache import Cache
from layers.params import Params
from layers.ragged import Ragged, Rectangle
from sharding import collectives

_ONE_ORDER = ("ffi_cpu", "ffi_cpu")  # products and attention whose sums have one, at any size


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotState:
    """Device state of the running sequences; row B is the sink of padding. The step adds the tokens
    that it keeps to a slot's committed length; on the host `Scheduler.commit` does so later.
    """

    num_tokens: jax.Array  # i32[B+1] committed length; positions and random streams derive from it
    last_token: jax.Array  # i32[B+1] newest token, not in the cache yet
    sampling: SlotSampling  # per-request parameters, written at admission
    counts: jax.Array  # u16[B+1, 2, V] in prompt and output; [1, 1, 1] without penalties
    proposer: State = None
    # u32[L, E] tokens routed to each expert of each mixture, modulo 2^32; None without mixtures
    expert_visits: jax.Array | None = None


def init_slots(config: Config) -> SlotState:
    """Puts empty slots on the device without compiling; copies, since steps overwrite them."""
    rows, vocab = config.engine.max_seqs + 1, config.model.vocab_size
    counts = (rows, 2, vocab) if config.engine.requests.penalties else (1, 1, 1)
    put = functools.partial(jax.device_put, may_alias=False)
    proposer, mixtures = proposers.of(config), config.model.mixtures
    return SlotState(
        num_tokens=put(np.zeros(rows, np.int32)),
        last_token=put(np.zeros(rows, np.int32)),
        sampling=put(parameters.init(rows, vocab)),
        counts=put(np.zeros(counts, np.uint16)),
        proposer=None if proposer is None else put(proposer.init()),
        expert_visits=None if mixtures is None else put(np.zeros(mixtures, np.uint32)),
    )


def admit(
    cache: Cache, slots: SlotState, admissions: Admissions, *, config: Config
) -> tuple[Cache, SlotState]:
    """Writes the slots of admitted sequences. A fork starts with its source's states and a copy of
    its open page, a sequence that stays in its slot with its own, one that resumes with a snapshot,
    others with zeros; tokens that are cached already are counted.
    """
    slot_A, source_A = admissions.slot_A, admissions.source_A
    model = config.cached_model

    starts = slot_A, source_A, admissions.num_tokens_A, admissions.snapshot_A
    cache = kv_cache.start_states(cache, *starts)
    cache = kv_cache.copy_pages(cache, model.page_groups, admissions.page_copies)
    slots = dataclasses.replace(
        slots,
        num_tokens=slots.num_tokens.at[slot_A].set(admissions.num_tokens_A),
        last_token=slots.last_token.at[slot_A].set(admissions.last_token_A),
        sampling=jax.tree.map(
            lambda old, new: old.at[slot_A].set(new), slots.sampling, admissions.sampling
        ),
        counts=_count_history(slots.counts, admissions),
    )
    if proposer := proposers.of(config):
        state = proposer.admit(slots.proposer, slot_A, source_A, admissions.history)
        slots = dataclasses.replace(slots, proposer=state)
    return cache, slots


def _count_history(counts: jax.Array, admissions: Admissions) -> jax.Array:
    """Token counts of the admitted slots, of the tokens that are cached already."""
    if counts.size == 1:
        return counts
    slot_A, history = admissions.slot_A, admissions.history
    prompt_length_A = admissions.sampling.prompt_length[:, None]
    is_output = (jnp.arange(history.shape[1]) >= prompt_length_A).astype(jnp.int32)
    counts = counts.at[slot_A].set(0)
    is_cached = jnp.arange(history.shape[1]) < admissions.num_tokens_A[:, None]
    is_token = is_cached.astype(counts.dtype)
    return counts.at[slot_A[:, None], is_output, history].add(is_token)


def step(
    params: Params,
    cache: Cache,
    slots: SlotState,
    batch: Batch,
    *,
    config: Config,
    shape: StepShape,
    attention: str,
) -> tuple[Cache, SlotState, PackedOutput]:
    """Feeds a batch through the model, samples, verifies drafts and advances the slots.

    Args:
        cache, slots: leaves of `kv_cache.abstract`, and slots, donated.
        batch: arrays of `shape`.
        attention: the implementation that the cache is laid out for (`api.choose`).

    Returns:
        The cache with the step's tokens, the slots after it, and its outputs.
    """
    fill = functools.partial(_rows_to_fill, config=config, attention=attention)
    proposer, drafts = proposers.of(config, attention), None
    if proposer is not None:
        with jax.named_scope("propose"):
            proposal_inputs = _proposal_inputs(config, shape, slots, batch)
            cache, drafts = proposer.propose(params, cache, slots.proposer, proposal_inputs)
    if drafts is not None:
        batch = _with_drafts(shape, batch, drafts)
    ragged = view(shape, slots, batch, drafts, fill(shape.num_tokens))
    slot_T = ragged.slot_T
    tokens_T = jnp.pad(batch.tokens_T, (0, ragged.num_fillers))
    tokens_T = jnp.where(tokens_T < 0, slots.last_token[slot_T], tokens_T)
    adapter_T = _adapters_of_tokens(shape, batch, ragged)
    weights = _with_adapters(params, config, adapter_T)
    # From here on T and Q include the fillers of `deterministic`; outputs leave them out.
    num_own = config.chip_model.num_layers  # the others are a proposer's
    hidden_TD, features, own_cache, routed = decoder.layers(
        weights, config.chip_model, decoder.embedded(weights, config.chip_model, tokens_T, ragged),
        ragged, cache[:num_own], tokens_T=tokens_T, features=proposer.features if proposer else (),
        deterministic=config.engine.deterministic, attention=attention,
    )  # fmt: skip
    cache = (*own_cache, *cache[num_own:])
    rows, width = shape.decode
    logit_Q = jnp.concatenate([jnp.arange(rows * width), _last_of_chunks(shape, batch)])
    logit_Q = jnp.pad(logit_Q, (0, fill(shape.num_logits)))
    logits = functools.partial(_logits, params, config)
    logits_QV = logits(hidden_TD[logit_Q], None if adapter_T is None else adapter_T[logit_Q])
    fed = _fed_counts(slots, tokens_T, slot_T, ragged, shape)
    with jax.named_scope("sample"):
        summary = topk.summarize(logits_QV)
        position_Q, slot_Q = ragged.position_T[logit_Q] + 1, slot_T[logit_Q]
        sampling_Q = jax.tree.map(lambda x: x[slot_Q], slots.sampling)
        counts = None if shape.greedy else _counts_seen(fed, slot_Q, tokens_T, shape, ragged)
        ids_Q, mask_QX = summary.best_Q, batch.mask_QX
        if mask_QX is not None:
            filled = (0, fill(shape.num_logits)), (0, 0)
            mask_QX = jnp.pad(mask_QX, filled, constant_values=sampler.ALL)
        if not shape.greedy:
            ids_Q = sampler.sample(logits_QV, summary, sampling_Q, position_Q, counts, mask_QX)
        samples = logits_QV, sampling_Q, position_Q, counts, mask_QX
        ids_Q, num_accepted_R, path_RW = _verify(
            config, shape, ids_Q, samples, batch, drafts, ragged
        )
        logprob_Q, finite_Q = sampler.log_probs(logits_QV, summary, ids_Q)
        top_Qn = sampler.top_log_probs(logits_QV, summary, config.engine.requests.top_logprobs)
    # A decode row feeds its newest token and its drafts, and keeps as many of these as it emits.
    num_accepted_Y = jnp.pad(num_accepted_R, (0, shape.prefill[0]))
    num_emitted_Y = jnp.where(batch.emits_Y, 1 + num_accepted_Y, 0).astype(jnp.int32)
    is_decode_Y = jnp.arange(shape.num_rows) < rows
    num_kept_Y = jnp.where(is_decode_Y, num_emitted_Y, batch.query_length_Y)
    by_row = functools.partial(_rows_of_logits, shape=shape, path_RW=path_RW)
    finite_YW = by_row(finite_Q)
    used_YW = jnp.arange(finite_YW.shape[1]) < jnp.maximum(num_emitted_Y, 1)[:, None]
    output = StepOutput(
        tokens=by_row(ids_Q),
        num_emitted=num_emitted_Y,
        **_drafted(shape, drafts, ragged),
        finite=(finite_YW | ~used_YW).all(-1),
        logprobs=by_row(logprob_Q),
        top_ids=by_row(top_Qn[1]),
        top_logprobs=by_row(top_Qn[0]),
        **prompt_results.score(
            logits,
            shape,
            hidden_TD,
            adapter_T,
            batch.targets_YW,
            config.engine.requests.top_logprobs,
        ),
        pooled=prompt_results.pool(shape, hidden_TD, batch.is_pooled_YW),
    )
    slots = _advance(slots, rows, batch, output, num_kept_Y, fed)
    if routed is not None and slots.expert_visits is not None:
        total_LE = slots.expert_visits + routed.num_tokens.astype(jnp.uint32)
        slots = dataclasses.replace(slots, expert_visits=total_LE)
    if path_RW is not None:
        with jax.named_scope("keep"):
            path = AcceptedPath(ragged, path_RW)
            own_cache = path.moved(cache[:num_own], config.chip_model.page_groups)
            cache = (*own_cache, *cache[num_own:])
            ragged, tokens_T, hidden_TD = path.ragged, path.along(tokens_T), path.along(hidden_TD)
            features = tuple(map(path.along, features))
    if proposer is not None:
        after = SampledStep(
            ragged, tokens_T, hidden_TD, features, num_kept_Y, batch.slot_Y,
            slots.num_tokens[batch.slot_Y], output.tokens, output.num_emitted,
        )  # fmt: skip
        with jax.named_scope("propose"):
            cache, state = proposer.observe(params, cache, slots.proposer, after)
        slots = dataclasses.replace(slots, proposer=state)
    return cache, slots, packed_output.pack(output)


def _with_drafts(shape: StepShape, batch: Batch, drafts: Drafts) -> Batch:
    """The batch with the device's drafts, up to each row's limit; a tree's nodes stay in place."""
    rows, width = shape.decode
    own_Rk = batch.tokens_T[: rows * width].reshape(rows, width)[:, 1:]
    draft_Rk = jnp.where(own_Rk < 0, drafts.tokens_Rk, own_Rk)
    is_chain = drafts.parent_Rk is None
    num_drafts_R = jnp.cumprod(draft_Rk >= 0, axis=1).sum(1) if is_chain else width - 1
    tokens_RW = jnp.pad(jnp.maximum(draft_Rk, 0), ((0, 0), (1, 0)), constant_values=-1)
    length_R = jnp.minimum(batch.query_length_Y[:rows], 1 + num_drafts_R)
    return dataclasses.replace(
        batch,
        tokens_T=_replaced(batch.tokens_T, tokens_RW.ravel()),
        query_length_Y=_replaced(batch.query_length_Y, length_R.astype(jnp.int32)),
    )


def _proposal_inputs(
    config: Config, shape: StepShape, slots: SlotState, batch: Batch
) -> DraftInputs:
    (rows, width), (chunks, tokens) = shape.decode, shape.prefill
    rectangles = view(shape, slots, batch).rectangles
    slot_R = batch.slot_Y[:rows]
    return DraftInputs(
        decode=rectangles[0] if rows and width > 1 else None,
        token_R=slots.last_token[slot_R],
        sampling=jax.tree.map(lambda x: x[slot_R], slots.sampling),
        counts=None if slots.counts.size == 1 else slots.counts[slot_R],
        prompts=rectangles[-1] if chunks else None,
        prompt_YW=batch.tokens_T[rows * width :].reshape(chunks, tokens),
        greedy=shape.greedy,
        acceptance=config.engine.drafts.acceptance,
    )


def _logits(
    params: Params, config: Config, hidden_QD: jax.Array, adapter_Q: jax.Array | None
) -> jax.Array:
    """Float32 [Q, V], on a mesh the chip's part of the vocabulary: -inf where it has no more."""
    if adapter_Q is not None and "vocab" in config.engine.adapters.extras:
        head = {"table": params["embed"]["table"]} | params.get("head", {})
        stacks = {adapters.HEAD: params[adapter_stacks.NAME][adapters.HEAD]}
        infos = adapters.adaptable(config.chip_model, ["vocab"])
        params = params | adapted.bound({"head": head}, stacks, infos, adapter_Q)
    logits_QV = decoder.logits(params, config.chip_model, hidden_QD)
    if config.chip_model.vocab_size * collectives.num_chips() == config.model.vocab_size:
        return logits_QV
    first = collectives.chip() * config.chip_model.vocab_size
    is_token_V = first + jnp.arange(logits_QV.shape[1]) < config.model.vocab_size
    return jnp.where(is_token_V, logits_QV, -jnp.inf)


def _rows_to_fill(num_rows: int, config: Config, attention: str) -> int:
    """Rows of padding that products need under `deterministic`: with fewer, XLA sums in another
    order. The native library has one for any number.
    """
    engine = config.engine
    is_even = not engine.deterministic or (engine.kernels.linear, attention) == _ONE_ORDER
    return 0 if is_even else max(0, MIN_DETERMINISTIC_ROWS - num_rows)


def view(
    shape: StepShape,
    slots: SlotState,
    batch: Batch,
    drafts: Drafts | None = None,
    num_fillers: int = 0,
) -> Ragged:
    """The rectangles of a batch; positions follow from the slots' committed lengths. Drafts of
    a row are a chain, unless `drafts` are trees.
    """
    rectangles, first = [], 0
    for (rows, width), is_chained in ((shape.decode, False), (shape.prefill, True)):
        if rows:
            part = slice(first, first + rows)
            valid_YW = jnp.arange(width) < batch.query_length_Y[part, None]
            start_Y = slots.num_tokens[batch.slot_Y[part]] + batch.query_start_Y[part]
            position_YW = start_Y[:, None] + jnp.arange(width)
            newest = jnp.max(jnp.where(valid_YW, position_YW, 0))
            position_YW = jnp.where(valid_YW, position_YW, newest)
            tables = tuple(table[part] for table in batch.tables)
            dropped_Y = None if batch.num_dropped_Y is None else batch.num_dropped_Y[part]
            rectangles.append(
                Rectangle(
                    batch.slot_Y[part], position_YW, valid_YW, tables, num_dropped_Y=dropped_Y,
                    is_chained=is_chained,
                )
            )  # fmt: skip
        first += rows
    if drafts is not None and drafts.parent_Rk is not None:
        rectangles[0] = draft_tree.branching(rectangles[0], drafts.parent_Rk, drafts.levels)
    return Ragged(tuple(rectangles), num_fillers)


def _adapters_of_tokens(shape: StepShape, batch: Batch, ragged: Ragged) -> jax.Array | None:
    """The slot of each token's adapter, i32[T]; None where the engine has none."""
    if batch.adapter_Y is None:
        return None
    decode_R, chunk_R = jnp.split(batch.adapter_Y, [shape.decode[0]])
    slot_T = jnp.concatenate(
        [jnp.repeat(decode_R, shape.decode[1]), jnp.repeat(chunk_R, shape.prefill[1])]
    )
    return jnp.pad(slot_T, (0, ragged.num_fillers), constant_values=NO_SLOT)


def _with_adapters(params: Params, config: Config, adapter_T: jax.Array | None) -> Params:
    """The parameters with the adapters of tokens, but for the head's."""
    if adapter_T is None:
        return params
    infos = adapters.adaptable(config.chip_model, config.engine.adapters.extras)
    stacks = params[adapter_stacks.NAME]
    by_token = {path: stacks[path] for path in infos if path != adapters.HEAD}
    return adapted.bound(params, by_token, infos, adapter_T)


def _last_of_chunks(shape: StepShape, batch: Batch) -> jax.Array:
    """Packed index of each chunk's last valid token."""
    (rows, width), (chunks, tokens) = shape.decode, shape.prefill
    last = jnp.maximum(batch.query_length_Y[rows:], 1) - 1
    return rows * width + jnp.arange(chunks) * tokens + last


def _rows_of_logits(x_Q: jax.Array, shape: StepShape, path_RW: jax.Array | None) -> jax.Array:
    """[Q, ...] -> [Y, W, ...], of trees along accepted paths; a chunk's only row is zero-padded."""
    rows, width = shape.decode
    decode = x_Q[: rows * width].reshape(rows, width, *x_Q.shape[1:])
    if path_RW is not None:
        decode = accepted_path.take(decode, path_RW)
    chunks = x_Q[rows * width : shape.num_logits, None]
    padding = [(0, 0), (0, decode.shape[1] - 1)] + [(0, 0)] * (x_Q.ndim - 1)
    return jnp.concatenate([decode, jnp.pad(chunks, padding)])


def _verify(
    config: Config,
    shape: StepShape,
    ids_Q: jax.Array,
    samples: tuple[jax.Array, SlotSampling, jax.Array, jax.Array | None, jax.Array | None],
    batch: Batch,
    drafts: Drafts | None,
    ragged: Ragged,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The ids that stand, i32[Q], how many drafts each decode row accepts, i32[R], and of trees the
    accepted paths; `ids_Q` are plain decoding's, `samples` what `sampler.distribution` takes.
    """
    rows, width = shape.decode
    num_decode = rows * width
    ids_RW = ids_Q[:num_decode].reshape(rows, width)
    token_RW = batch.tokens_T[:num_decode].reshape(rows, width)
    num_drafts_R = jnp.maximum(batch.query_length_Y[:rows] - 1, 0)
    rule = "coupled" if shape.greedy else config.engine.drafts.acceptance
    is_tree = drafts is not None and drafts.parent_Rk is not None
    if drafts is None or (rule == "coupled" and not is_tree):
        return ids_Q, coupled.num_accepted(ids_RW, token_RW[:, 1:], num_drafts_R), None
    follows_Rk = jnp.arange(width - 1) if drafts.parent_Rk is None else drafts.parent_Rk
    is_used_Rk = ragged.rectangles[0].valid_YW[:, 1:] & (drafts.tokens_Rk >= 0)
    parent_RN = jnp.where(is_used_Rk, follows_Rk, -1)
    parent_RN = jnp.pad(parent_RN, ((0, 0), (1, 0)), constant_values=-1).astype(jnp.int32)
    max_length = 1 + drafts.levels if is_tree else width  # W in `path_RW`; elsewhere a row's nodes
    if rule == "coupled":
        accepted = trees.coupled(ids_RW, token_RW, parent_RN, max_length)
        return ids_Q, accepted.num_emitted_R - 1, accepted.path_RW
    verified = jax.tree.map(lambda x: x[:num_decode], samples)
    prob_RWV = sampler.distribution(*verified).reshape(rows, width, -1)
    _, sampling_Q, position_Q, *_ = verified
    seed_R2, position_R = sampling_Q.seed[::width], position_Q[::width]
    if rule == "rejection" and not is_tree:
        ids_RW, num_emitted_R = rejection.verify(
            prob_RWV, seed_R2, position_R, token_RW[:, 1:], num_drafts_R, drafts.prob_RkV
        )
        return _replaced(ids_Q, ids_RW.ravel()), num_emitted_R - 1, None
    accept = trees.typical if rule == "typical" else trees.by_rejection
    accepted = accept(prob_RWV, seed_R2, position_R, token_RW, parent_RN, max_length)
    node_RW = jnp.where(accepted.path_RW >= 0, accepted.path_RW, width)
    ids_RW = ids_RW.at[jnp.arange(rows)[:, None], node_RW].set(accepted.tokens_RW, mode="drop")
    path_RW = accepted.path_RW if is_tree else None
    return _replaced(ids_Q, ids_RW.ravel()), accepted.num_emitted_R - 1, path_RW


def _drafted(shape: StepShape, drafts: Drafts | None, ragged: Ragged) -> dict[str, jax.Array]:
    """How many drafts each row has verified, and how deep they lie."""
    rows, width = shape.decode
    if rows == 0 or width == 1:
        return dict.fromkeys(("num_drafts", "num_levels"), jnp.zeros(0, jnp.int32))
    rectangle = ragged.rectangles[0]
    is_used_Rk = rectangle.valid_YW[:, 1:]
    if drafts is not None and drafts.parent_Rk is not None:
        is_used_Rk &= drafts.tokens_Rk >= 0
    level_Rk = rectangle.position_YW[:, 1:] - rectangle.position_YW[:, :1]
    level_R = jnp.where(is_used_Rk, level_Rk, 0).max(1)
    counts = {"num_drafts": is_used_Rk.sum(1, dtype=jnp.int32), "num_levels": level_R}
    return {name: jnp.pad(x_R, (0, shape.prefill[0])) for name, x_R in counts.items()}


def _replaced(x_N: jax.Array, first: jax.Array) -> jax.Array:
    """An array with other first entries, up to all of them.

    There `x_N.at[:n].set(first)` makes a constant without entries, which on a mesh becomes an input
    of the step: at it XLA crashes (Shardy, jaxlib 0.11.2).
    """
    return jnp.concatenate([first, x_N[first.shape[0] :]])


def _fed_counts(
    slots: SlotState, tokens_T: jax.Array, slot_T: jax.Array, ragged: Ragged, shape: StepShape
) -> jax.Array | None:
    """Token counts after the step but for drafts, which may be rejected; None without penalties."""
    if slots.counts.size == 1:
        return None
    rows, width = shape.decode
    is_first_RW = jnp.broadcast_to(jnp.arange(width) == 0, (rows, width))
    is_certain_T = ragged.valid_T & _replaced(jnp.ones_like(ragged.valid_T), is_first_RW.ravel())
    is_output_T = ragged.position_T >= slots.sampling.prompt_length[slot_T]
    return slots.counts.at[slot_T, is_output_T.astype(jnp.int32), tokens_T].add(
        is_certain_T.astype(slots.counts.dtype)
    )


def _counts_seen(
    fed: jax.Array | None, slot_Q: jax.Array, tokens_T: jax.Array, shape: StepShape, ragged: Ragged
) -> jax.Array | None:
    """Token counts a row of logits, [Q, 2, V]: a draft counts in its own row and in later ones."""
    if fed is None:
        return None
    rows, width = shape.decode
    counts_Q, bits_YW = fed[slot_Q], ragged.rectangles[0].ancestors_YW
    if width == 1:
        return counts_Q
    # Whether the last axis' token is a draft that the other sees.
    nth_W = jnp.arange(width, dtype=jnp.uint32)
    is_seen = (nth_W <= nth_W[:, None]) & (nth_W > 0)
    if bits_YW is not None:
        is_seen &= (bits_YW[:, :, None] >> nth_W & 1) > 0
    is_seen = jnp.broadcast_to(is_seen, (rows, width, width)).astype(counts_Q.dtype)
    row_YW1 = jnp.arange(rows * width).reshape(rows, width, 1)
    token_Y1W = tokens_T[: rows * width].reshape(rows, 1, width)
    return counts_Q.at[row_YW1, 1, token_Y1W].add(is_seen)


def _advance(
    slots: SlotState,
    rows: int,
    batch: Batch,
    output: StepOutput[jax.Array],
    num_kept_Y: jax.Array,
    fed: jax.Array | None,
) -> SlotState:
    """Slots after the step: lengths, newest tokens, counts of accepted drafts; `num_kept_Y` of the
    tokens fed stay.
    """
    width = output.tokens.shape[1]
    newest_Y = jnp.take_along_axis(
        output.tokens, jnp.maximum(output.num_emitted - 1, 0)[:, None], axis=1
    )[:, 0]
    sink = slots.num_tokens.shape[0] - 1
    emitting_Y = jnp.where(output.num_emitted > 0, batch.slot_Y, sink)
    counts = slots.counts if fed is None else fed
    if fed is not None and width > 1:
        accepted = jnp.arange(width - 1) < output.num_emitted[:rows, None] - 1
        counts = counts.at[batch.slot_Y[:rows, None], 1, output.tokens[:rows, :-1]].add(
            accepted.astype(counts.dtype)
        )
    return dataclasses.replace(
        slots,
        num_tokens=slots.num_tokens.at[batch.slot_Y].add(num_kept_Y).at[sink].set(0),
        last_token=slots.last_token.at[emitting_Y].set(newest_Y),
        counts=counts,
    )
