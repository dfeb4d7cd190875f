"use strict";
// A plan from a model's coefficients, pure: what cost.py, roofline.py and deployment.py compute, under
// the same names. A test holds the two equal to a millionth at random points.

/** Bytes of `elements` that lie in rows of `row` elements, scales included. */
function bytesFor(format, elements, row) {
  const group = Math.min(row, format.group || row),
    scales = format.rows > 1 ? (elements / row) * Math.ceil(row / group) : elements / group,
    scaleBits = (scales * format.scale_bits) / format.rows;
  return (elements * format.bits + scaleBits + (elements / row) * format.row_bits) / 8;
}

/** A coefficient, which may depend on the number of key/value heads. */
const sized = (value, kvHeads) =>
  typeof value === "object" ? value.base + value.per_head * kvHeads : value;

// As configs/cache.py and configs/settings/cache.py have them.
const SCALED_TOGETHER = 64,
  LANES = 128;

const sum = (list, of) => list.reduce((found, item) => found + of(item), 0);

const ONE_CHIP = { data: 1, model: 1, expert: 1, context: 1 };

/** Chips that work for the same sequences. */
const groupChips = ({ model, context }) => model * context;

/** Everything a row is computed from; `input` names what the controls name. */
function deployment(catalog, input) {
  const model = catalog.models[input.model],
    chip = catalog.hardware[input.hardware];
  const mesh = {
    data: input.data ?? 1,
    model: input.chips ?? 1,
    expert: input.expert ?? 1,
    context: input.context_chips ?? 1,
  };
  return {
    model,
    mesh,
    hardware: input.price == null ? chip : { ...chip, price_per_hour: input.price },
    kvHeads: input.kv_heads ?? model.kv_heads,
    weights: catalog.formats[input.weights ?? model.dtype],
    cache: catalog.cache_formats[input.cache ?? model.dtype],
    rest: catalog.formats[model.dtype],
    formats: catalog.formats,
    replicas: input.replicas ?? 1,
    samples: input.samples ?? 1,
    numChips: mesh.data * mesh.expert * groupChips(mesh),
    numGroups: mesh.data * mesh.expert,
    drafts: input.drafts ?? 0,
    acceptance: input.acceptance ?? 0,
    draftCost: input.draft_cost ?? 0,
    models: 1 + (input.drafts ? (input.draft_size ?? 0) : 0),
    lecture: input.accounting === "lecture",
  };
}

// --- weights -------------------------------------------------------------------------------------

const elementsOf = (part, kvHeads) => part.count * sized(part.elements, kvHeads);

const numParameters = ({ model, kvHeads }) => sum(model.weights, (p) => elementsOf(p, kvHeads));

/** Weights that one token is multiplied with: two FLOPs each. */
function numActiveParameters({ model, kvHeads }) {
  const products = model.operations.filter((o) => o.rows.length);
  return sum(products, (o) => (o.layers * sum(o.flops, ([n]) => sized(n, kvHeads))) / 2);
}

function partBytes(d, part) {
  const format = d[part.format] ?? d.formats[part.format];
  return bytesFor(format, elementsOf(part, d.kvHeads), sized(part.row, d.kvHeads));
}

const weightBytes = (d) => sum(d.model.weights, (part) => partBytes(d, part));

/** Bytes of the weights that one chip of the mesh holds. */
function chipWeightBytes(d) {
  return sum(d.model.weights, (part) => {
    const stored = partBytes(d, part) / (part.by_expert ? d.mesh.expert : 1);
    const copied = sized(part.kv_elements, d.kvHeads) / sized(part.elements, d.kvHeads);
    const divided = part.by_context ? groupChips(d.mesh) : d.mesh.model;
    return chipPart(stored, part.is_split ? divided : 1, copied, sized(part.kv_heads, d.kvHeads));
  });
}

/** A chip's part of what `chips` divide, where the share `copied` of it has so many parts. */
const chipPart = (whole, chips, copied, parts) =>
  (whole * (1 - copied)) / chips + (whole * copied) / Math.min(chips, parts);

// --- a step --------------------------------------------------------------------------------------

/** `count` sequences feed `queries` tokens each, the last of which sees `context` positions. */
function decodeWork(requests, context, drafts, samples) {
  const count = requests * samples,
    numTokens = count * (1 + drafts);
  return {
    numTokens,
    requests,
    count,
    queries: 1 + drafts,
    context: context + drafts,
    drafts,
    numLogits: numTokens,
  };
}

const prefillWork = (batch, context) => ({
  numTokens: batch * context,
  requests: batch,
  count: batch,
  queries: context,
  context,
  drafts: 0,
  numLogits: batch,
});

/** Pairs of query and visible key in one sequence. */
function pairsOf({ queries, context }, window) {
  const first = context - queries + 1;
  if (window === null || context <= window) return (queries * (first + context)) / 2;
  const growing = Math.max(0, window - first);
  return (growing * (first + window - 1)) / 2 + (queries - growing) * window;
}

/** Pairs of a sequence's first tokens, each of which sees its own chunk up to itself. */
function seenInChunks(numTokens, size) {
  const whole = Math.floor(numTokens / size);
  const rest = numTokens % size;
  return (whole * size * (size + 1) + rest * (rest + 1)) / 2;
}

/** Keys of the chunks that one sequence's queries are in, at most so many a query. */
function readInChunks({ queries, context }, size, most) {
  const live = context - Math.floor((context - queries) / size) * size;
  return most === null ? live : Math.min(live, queries * most);
}

/** Keys that one sequence reads: the visible ones, at most so many a query. */
function readOf({ queries, context }, window, most) {
  const live = window === null ? context : Math.min(context, queries + window - 1);
  return most === null ? live : Math.min(live, queries * most);
}

/** The quantities of a step, as configs/kinds/operations.py names them. */
const QUANTITIES = {
  tokens: (work) => work.numTokens,
  logits: (work) => work.numLogits,
  experts: (work, all, visited) => all * (1 - (1 - visited / all) ** work.numTokens),
  sequences: (work) => work.count,
  queries: (work) => work.count * work.queries,
  drafts: (work) => work.count * work.drafts,
  pairs: (work, window) => work.count * pairsOf(work, window),
  read: (work, window, most) => work.count * readOf(work, window, most),
  chunk_pairs: (work, size) =>
    work.count * (seenInChunks(work.context, size) - seenInChunks(work.context - work.queries, size)),
  chunk_read: (work, size, most) => work.count * readInChunks(work, size, most),
};

/** The sum of coefficient times quantity. */
const amountOf = (amount, work, kvHeads) =>
  sum(amount, ([coefficient, [name, ...of]]) =>
    sized(coefficient, kvHeads) * (name ? QUANTITIES[name](work, ...of) : 1),
  );

/** Every operation of one step. */
const stepOperations = (d, work) =>
  d.model.operations.map((declared) => evaluate(d, declared, work));

function evaluate(d, declared, work) {
  const { name, kind, layers, is_split, by_expert, by_context } = declared;
  const count = (amount) => amountOf(amount, work, d.kvHeads);
  const size = (field) => sized(declared[field], d.kvHeads);
  const moved = (what, as) =>
    sum(declared.moves, (move) => {
      if (move.what !== what) return 0;
      const format = as ?? d[move.format] ?? d.formats[move.format];
      return bytesFor(format, layers * count(move.amount), sized(move.row, d.kvHeads));
    });
  const flops = layers * count(declared.flops);
  const visited = count(declared.visited);
  const [weight_bytes, cache_bytes, activation_bytes] = ["weights", "cache", "activations"].map(
    (what) => moved(what),
  );
  const bytes = weight_bytes + cache_bytes + activation_bytes;
  return {
    name,
    kind,
    layers,
    flops,
    weight_bytes,
    cache_bytes,
    activation_bytes,
    bytes,
    intensity: bytes ? flops / bytes : 0,
    split: is_split,
    by_expert,
    by_context,
    cache_parts: size("cache_parts"),
    copied: size("kv_rows") / size("all_rows"),
    rows: !declared.rows.length ? Infinity : visited ? count(declared.rows) / visited : 0,
    requests: work.requests,
    expansion: cache_bytes ? moved("cache", d.rest) / cache_bytes : 1,
  };
}

/** Bytes of a sequence of `length` tokens on a chip: what windows keep, and states. */
function cacheBytes(d, length, mesh = ONE_CHIP) {
  return sum(d.model.caches, (cached) => {
    const { layers, elements, row, window, state_bytes: state } = cached;
    const tokens = window === null ? length : Math.min(length, window);
    const divided = Math.min(mesh.model, sized(cached.parts, d.kvHeads));
    const perToken = bytesFor(d.cache, sized(elements, d.kvHeads), row) / divided;
    const states = (state * (1 + d.drafts)) / divided;
    const tokenBytes = (tokens / mesh.context) * (perToken + paddingBytes(d, cached, divided));
    return layers * (tokenBytes + states);
  });
}

/** Bytes that a row takes beyond its own on one of `chips`, as `CacheSpec.padding_bytes` says. */
function paddingBytes({ hardware, cache, kvHeads }, { row_parts, values_in_keys }, chips) {
  const { name, bits, group, scale_bits } = cache;
  if (!hardware.padded_caches.includes(name) || !(values_in_keys || scale_bits)) return 0;
  const parts = row_parts.map(([count, width]) => [
    (sized(count, kvHeads) / (values_in_keys ? 1 : chips)) * width,
    group || (width % SCALED_TOGETHER ? width : SCALED_TOGETHER),
  ]);
  const scales = sum(parts, ([elements, size]) => Math.floor(elements / size));
  const bytes = (sum(parts, ([elements]) => elements) * bits + scales * scale_bits) / 8;
  const whole = LANES * (scale_bits ? 1 : bits / 8);
  return Math.ceil(bytes / whole) * whole - bytes;
}

/** Bytes of a copy of a sequence's states. */
const snapshotBytes = (d, mesh = ONE_CHIP) => cacheBytes({ ...d, drafts: 0 }, 0, mesh);

// --- seconds -------------------------------------------------------------------------------------

/** FLOPs a second; a chip of which no rate is known computes for nothing. */
const rateOf = (hardware, compute) =>
  hardware.rates[compute] ?? hardware.rates.bfloat16 ?? Infinity;

/** FLOPs a second that an operation's products run at. */
function rateFor(d, found) {
  const { compute } = found.kind === "matrix" ? d.weights : d.rest;
  return rateOf(d.hardware, compute) * d.hardware.rate_share;
}

const bandwidthOf = ({ hardware }) => hardware.read_bandwidth * hardware.bandwidth_share;

/** Share of a group's requests that the fullest chip along `expert` works for. */
const fullest = (requests, mesh) => Math.ceil(requests / mesh.expert) / requests;

/** A chip's part of an operation. */
function perChip({ mesh }, found) {
  const isAttention = found.kind === "attention";
  const positions = found.by_context && isAttention ? mesh.context : 1;
  const columns = found.by_context && !isAttention ? mesh.context : 1;
  const heads = (found.split ? mesh.model : 1) * columns;
  const isDivided = found.by_expert;
  const part = (whole) => chipPart(whole, heads, found.copied, found.cache_parts);
  const share = isDivided ? 1 / mesh.expert : fullest(found.requests, mesh);
  const flops = (part(found.flops) / positions) * share;
  const weight_bytes = part(found.weight_bytes) / (isDivided ? mesh.expert : 1);
  const cached = found.cache_bytes / Math.min(heads, found.cache_parts);
  const cache_bytes = (cached / positions) * share;
  const activation_bytes = part(found.activation_bytes) * share;
  return {
    flops,
    weight_bytes,
    cache_bytes,
    activation_bytes,
    bytes: weight_bytes + cache_bytes + activation_bytes,
  };
}

/** A chip's bytes and FLOPs, larger by what keeps an operation from the rates that steps reach. */
function asReached(d, found) {
  const done = perChip(d, found),
    { attention_share, cache_share: share, half_rows: half } = d.hardware;
  if (found.kind === "attention") {
    const gathered = done.cache_bytes * (share < 1 ? found.expansion : 1);
    const bytes = done.bytes + gathered * (1 / share - 1);
    return { bytes, flops: done.flops / attention_share };
  }
  return { bytes: done.bytes, flops: done.flops * (found.rows ? 1 + half / found.rows : 1) };
}

function timed(memory_s, compute_s, collective_s, overhead_s, total_s) {
  const parts = {
    memory: memory_s,
    compute: compute_s,
    collectives: collective_s,
    overhead: overhead_s,
  };
  const bound = Object.keys(parts).reduce((most, name) =>
    parts[name] > parts[most] ? name : most,
  );
  return { memory_s, compute_s, collective_s, overhead_s, total_s, bound };
}

function exactTime(d, work) {
  const { overhead_s: overhead, gamma } = d.hardware,
    exchanged = collectiveSeconds(d, work);
  let memory = 0,
    compute = 0,
    busy = 0;
  for (const found of stepOperations(d, work)) {
    const done = asReached(d, found),
      moving = done.bytes / bandwidthOf(d),
      computing = done.flops / rateFor(d, found);
    memory += moving;
    compute += computing;
    busy += Math.max(moving, computing) + gamma * Math.min(moving, computing);
  }
  return timed(memory, compute, exchanged, overhead, overhead + busy + exchanged);
}

function collectiveSeconds({ model, mesh, hardware }, { numTokens, requests, numLogits }) {
  if (!hardware.link_bandwidth) return 0;
  const share = fullest(requests, mesh),
    group = groupChips(mesh);
  const seconds = (moved, chips, kind) =>
    (kind === "all-reduce" ? 2 : 1) *
    (chips - 1) *
    ((share * moved * hardware.link_axes) / chips / hardware.link_bandwidth +
      hardware.link_latency_s);
  const product = (names, of) => names.reduce((factor, name) => factor * of(name), 1);
  const exchanged = sum(model.exchanges, ({ axes, kind, count: times, token_bytes, powers }) => {
    const grown = product(Object.keys(powers), (axis) => mesh[axis] ** powers[axis]);
    const chips = product(axes, (axis) => mesh[axis]);
    return times * seconds(token_bytes * numTokens * grown, chips, kind);
  });
  // The best value of each row of logits, its id and log-sum-exp; its logit.
  const sampled =
    seconds(12 * group * numLogits, group, "all-gather") +
    seconds(4 * numLogits, group, "all-reduce");
  return exchanged + sampled;
}

/** Weights and the caches of `numRead` requests once; two FLOPs a parameter and token. */
function lectureCost(d, numTokens, numRead, context) {
  const cached = cacheBytes({ ...d, drafts: 0 }, context, d.mesh);
  const bytes = chipWeightBytes(d) + Math.ceil(numRead / d.numGroups) * d.samples * cached;
  return { bytes, flops: (2 * numTokens * numActiveParameters(d)) / d.numChips };
}

/** The longer of reading and computing what the lecture counts. */
function lectureTime(d, numTokens, numRead, context) {
  const { bytes, flops } = lectureCost(d, numTokens, numRead, context);
  const memory = bytes / d.hardware.read_bandwidth,
    compute = flops / rateOf(d.hardware, d.weights.compute);
  return timed(memory, compute, 0, 0, Math.max(memory, compute));
}

const decodeOf = (d, batch, context) =>
  decodeWork(Math.ceil(batch / d.mesh.data), context, d.drafts, d.samples);
const prefillOf = (d, batch, context) => prefillWork(Math.ceil(batch / d.mesh.data), context);

/** Tokens that all sequences of `batch` requests feed in a decode step. */
const tokensFed = (d, batch) => batch * d.samples * (1 + d.drafts);

/** Time of one decode step; where there are drafts it verifies them. */
function decodeTime(d, batch, context) {
  if (!d.lecture) return exactTime(d, decodeOf(d, batch, context));
  const cost = lectureTime(d, tokensFed(d, batch), batch, context);
  return { ...cost, total_s: cost.memory_s };
}

function prefillTime(d, batch, context) {
  if (!d.lecture) return exactTime(d, prefillOf(d, batch, context));
  return lectureTime(d, batch * context, 0, context);
}

// --- a plan --------------------------------------------------------------------------------------

/** FLOPs a byte of a decode step, as the accounting counts both. */
function intensityOf(d, batch, context, operations) {
  const counted = d.lecture
    ? [lectureCost(d, tokensFed(d, batch), batch, context)]
    : operations;
  return sum(counted, (o) => o.flops) / sum(counted, (o) => o.bytes);
}

/** Experts of the largest mixture that at least one token of a step visits; null where there is none. */
function visitedExperts({ model, kvHeads }, work) {
  const visits = model.operations.flatMap(({ visited }) =>
    visited.filter(([, [name]]) => name === "experts"),
  );
  if (!visits.length) return null;
  const largest = visits.reduce((best, visit) => (visit[1][1] > best[1][1] ? visit : best));
  return amountOf([largest], work, kvHeads);
}

/** (1 - a^(k+1)) / (1 - a) */
function expectedTokens(acceptance, drafts) {
  let found = 0;
  for (let n = 0; n <= drafts; n++) found += acceptance ** n;
  return found;
}

// Samples of one request fork before the last token of its prompt, which each then decodes.
const forks = (d) => (d.samples > 1 ? 1 : 0);
const promptTokens = (d, context) => Math.max(1, context - forks(d));
const decodedTokens = (d, newTokens) => Math.max(0, newTokens - 1 + forks(d));
const meanLength = (d, context, newTokens) =>
  context + Math.floor(Math.max(0, newTokens - forks(d)) / 2);

/** Tokens of a sample, its thought included. */
const newTokensOf = (input) => (input.thinking_tokens ?? 0) + (input.new_tokens ?? 0);

/** Bytes of a request at its longest: its prompt once, and the tokens and states of each sample. */
const requestBytes = (d, context, newTokens, mesh = ONE_CHIP) =>
  (cacheBytes(d, context + newTokens, mesh) + (d.samples - 1) * cacheBytes(d, newTokens, mesh)) *
  d.models;

/** Time of proposing drafts, of which a step verifies some. */
const draftSeconds = (d, batch, context) =>
  d.drafts && d.drafts * d.draftCost * decodeTime({ ...d, drafts: 0 }, batch, context).total_s;

/** Time of `batch` requests that start and end together. */
function requestSeconds(d, batch, context, newTokens) {
  const middle = meanLength(d, context, newTokens);
  const step = decodeTime(d, batch, middle).total_s + draftSeconds(d, batch, middle);
  const steps = decodedTokens(d, newTokens) / expectedTokens(d.acceptance, d.drafts);
  return prefillTime(d, batch, promptTokens(d, context)).total_s + steps * step;
}

/**
 * The point of `batch` prompts of `context` tokens, each sample of which grows by its new tokens.
 * Bytes are of a whole replica unless they are a chip's, rates of all replicas.
 */
function plan(catalog, input) {
  const d = deployment(catalog, input),
    { hardware, mesh } = d;
  const { batch, context } = input,
    newTokens = newTokensOf(input);
  const middle = meanLength(d, context, newTokens);
  const held = weightBytes(d) * d.models,
    cached = batch * requestBytes(d, context, newTokens);
  const capacity = hardware.memory_bytes ?? Infinity;
  const chipHeld = chipWeightBytes(d) * d.models,
    room = capacity - chipHeld;
  const chipSequence = cacheBytes(d, context + newTokens, mesh) * d.models;
  // of each sequence's states one for prefixes, as the command keeps them unless it is told
  const onFullest = Math.ceil(batch / d.numGroups),
    chipSnapshot = snapshotBytes(d, mesh);
  const chipRequest = requestBytes(d, context, newTokens, mesh),
    chipHolds = chipRequest + d.samples * chipSnapshot;
  const chipCached = onFullest * chipHolds,
    snapshots = d.numGroups * onFullest * d.samples * snapshotBytes(d);
  const decode = decodeTime(d, batch, middle),
    prefill = prefillTime(d, batch, promptTokens(d, context));
  const perStep = expectedTokens(d.acceptance, d.drafts);
  const draft = draftSeconds(d, batch, middle),
    step = decode.total_s + draft;
  const perToken = step / perStep,
    rate = (d.replicas * batch * d.samples) / perToken;
  const first = prefill.total_s + forks(d) * step;
  const decoding = stepOperations(d, decodeOf(d, batch, middle));
  const price = hardware.price_per_hour ?? null;
  return {
    batch,
    context,
    parameters: numParameters(d),
    active_parameters: numActiveParameters(d),
    visited_experts: visitedExperts(d, decodeOf(d, batch, middle)),
    weight_bytes: held,
    cache_bytes: cached,
    memory_bytes: held + cached + snapshots,
    snapshot_bytes: snapshots,
    fits: chipCached <= room,
    step_s: step,
    ttft_s: first,
    output_tok_s: rate,
    request_s: newTokens ? requestSeconds(d, batch, context, newTokens) : null,
    answer_s: first + (input.thinking_tokens ?? 0) * perToken,
    intensity: intensityOf(d, batch, middle, decoding),
    bound: decode.bound,
    dollars_per_million:
      price === null ? null : ((price * d.numChips * d.replicas) / 3600 / rate) * 1e6,
    tpot_s: perToken,
    chip_bytes: chipHeld + chipCached,
    largest_batch: d.numGroups * Math.max(0, Math.floor(room / chipHolds)),
    chip_weight_bytes: chipHeld,
    chip_sequence_bytes: chipSequence,
    memory_room: room,
    tokens_per_step: perStep,
    ridge: (rateOf(hardware, d.weights.compute) * hardware.rate_share) / bandwidthOf(d),
    decode,
    prefill,
    decode_operations: decoding,
    prefill_operations: stepOperations(d, prefillOf(d, batch, promptTokens(d, context))),
    // what the pictures need beside the planner's own figures
    chip_cache_bytes: chipCached,
    chip_snapshot_bytes: chipSnapshot,
    chip_request_bytes: chipRequest,
    capacity_bytes: capacity,
    draft_s: draft,
    on_fullest: onFullest,
    steps: decodedTokens(d, newTokens) / perStep,
    deployment: d,
  };
}

// --- one request ---------------------------------------------------------------------------------

/** What request_cost.py says of one of `batch` equal requests, except for the thought below. */
function requestCost(catalog, input) {
  const p = plan(catalog, input),
    d = p.deployment,
    newTokens = newTokensOf(input);
  const chipSeconds = (p.request_s * d.numChips) / input.batch;
  const moved = (of) => sum(p.decode_operations, of);
  return {
    samples: d.samples,
    seconds: p.request_s,
    answer_s: p.answer_s,
    chip_s: chipSeconds,
    dollars:
      d.hardware.price_per_hour == null ? null : (d.hardware.price_per_hour * chipSeconds) / 3600,
    tokens: d.samples * newTokens,
    cache_bytes: requestBytes(d, input.context, newTokens),
    cache_share: moved((o) => o.cache_bytes) / moved((o) => o.bytes),
    largest_batch: p.largest_batch,
  };
}

/** Thinking tokens with which one sample takes as many seconds, as far as the context allows. */
function equalThinkingTokens(catalog, input) {
  const answer = input.new_tokens ?? 0;
  const time = (samples, newTokens) =>
    requestSeconds(deployment(catalog, { ...input, samples }), input.batch, input.context, newTokens);
  const limit = time(input.samples ?? 1, newTokensOf(input)) * (1 + 1e-9);
  let low = 0,
    high = catalog.models[input.model].max_context - input.context - answer;
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (time(1, answer + middle) <= limit) low = middle;
    else high = middle - 1;
  }
  return low;
}

// --- what may be asked ---------------------------------------------------------------------------

const MOST_CONTEXTS = 64;

const divisors = (n) => Array.from({ length: n }, (_, i) => i + 1).filter((i) => n % i === 0);

/** Chips that can divide each layer, as configs/mesh.py says; without links there is one. */
function validChips(model, hardware, kvHeads) {
  if (!hardware.link_bandwidth) return [1];
  const heads = model.cached_heads.map((value) => sized(value, kvHeads));
  return divisors(model.divided.length ? Math.min(...model.divided) : 1).filter(
    (chips) =>
      model.divided.every((size) => size % chips === 0) &&
      heads.every((count) => count % chips === 0 || chips % count === 0),
  );
}

/** Chips that can divide the experts of every mixture. */
function validExperts(model, hardware) {
  const sizes = model.num_experts;
  if (!sizes.length || !hardware.link_bandwidth) return [1];
  return divisors(sizes[0]).filter((n) => sizes.every((size) => size % n === 0));
}

/** Chips that can divide cached tokens, and feed-forwards together with `chips` along `model`. */
function validContexts({ divides_context, columns }, hardware, chips) {
  if (!divides_context || !hardware.link_bandwidth) return [1];
  const most = Array.from({ length: MOST_CONTEXTS }, (_, i) => i + 1);
  return most.filter((n) => columns.every((size) => size % (chips * n) === 0));
}
