"use strict";
// The planner's formulas, pure: cost.py, roofline.py, speculation.py and plan.py beside this file's
// folder, under the same names. A test holds the two equal to a millionth at random points.

/** Bytes of `elements` that lie in rows of `row` elements, scales included. */
function bytesFor(format, elements, row) {
  const group = Math.min(row, format.group || row);
  return (elements * (format.bits + format.scale_bits / group)) / 8;
}

/** A size that grows with the number of key/value heads: [constant, per head]. */
const sized = ([constant, perHead], kvHeads) => constant + perHead * kvHeads;

const sum = (list, of) => list.reduce((found, item) => found + of(item), 0);

/** Everything a row is computed from; `input` names what the controls name. */
function deployment(catalog, input) {
  const model = catalog.models[input.model],
    chip = catalog.hardware[input.hardware];
  const mesh = { data: input.data ?? 1, model: input.chips ?? 1, expert: input.expert ?? 1 };
  return {
    model,
    mesh,
    hardware: input.price == null ? chip : { ...chip, price_per_hour: input.price },
    kvHeads: input.kv_heads ?? model.kv_heads,
    weights: catalog.formats[input.weights ?? model.dtype],
    cache: catalog.formats[input.cache ?? model.dtype],
    rest: catalog.formats[model.dtype],
    replicas: input.replicas ?? 1,
    numChips: mesh.data * mesh.model * mesh.expert,
    numGroups: mesh.data * mesh.expert,
    drafts: input.drafts ?? 0,
    acceptance: input.acceptance ?? 0,
    draftCost: input.draft_cost ?? 0,
    models: 1 + (input.drafts ? (input.draft_size ?? 0) : 0),
    lecture: input.accounting === "lecture",
  };
}

// --- weights -------------------------------------------------------------------------------------

const tableElements = (model) => model.vocab_size * model.width;
const tables = (model) => tableElements(model) * (model.tied ? 1 : 2);
/** Weights that each chip holds whole: norms and biases, and a table of positions. */
const wholeElements = ({ model, kvHeads }) =>
  sized(model.vector_elements, kvHeads) + model.position_elements;
const copies = (matrix) => (matrix.experts ? matrix.experts.num_experts : 1);
const copiesPerToken = (matrix) => (matrix.experts ? matrix.experts.top_k : 1);

/** Expected number of an experts' matrices that `numTokens` tokens visit. */
function copiesTouched(matrix, numTokens) {
  if (!matrix.experts) return 1;
  const { num_experts: all, top_k: visited } = matrix.experts;
  return all * (1 - (1 - visited / all) ** numTokens);
}

function numParameters(d) {
  const { model, kvHeads } = d;
  const inLayers = sum(
    model.matrices,
    (m) => m.layers * copies(m) * sized(m.rows, kvHeads) * m.width,
  );
  return inLayers + wholeElements(d) + tables(model);
}

function numActiveParameters({ model, kvHeads }) {
  const used = sum(
    model.matrices,
    (m) => m.layers * copiesPerToken(m) * sized(m.rows, kvHeads) * m.width,
  );
  return used + tableElements(model);
}

function weightBytes(d) {
  const { model, kvHeads, weights, rest } = d;
  return (
    bytesFor(rest, wholeElements(d) + tables(model), model.width) +
    sum(model.matrices, (m) =>
      bytesFor(weights, m.layers * copies(m) * sized(m.rows, kvHeads) * m.width, m.width),
    )
  );
}

/** Bytes of the weights that one chip of the mesh holds. */
function chipWeightBytes(d) {
  const { model, mesh, kvHeads, weights, rest } = d;
  const whole = bytesFor(rest, wholeElements(d), model.width);
  const divided = bytesFor(rest, tables(model), model.width) / mesh.model;
  return (
    whole +
    divided +
    sum(model.matrices, (m) => {
      const elements = m.layers * copies(m) * sized(m.rows, kvHeads) * m.width;
      const held = bytesFor(weights, elements, m.width) / (m.experts ? mesh.expert : 1);
      return chipPart(held, m.split ? mesh.model : 1, copiedShare(m, kvHeads), kvHeads);
    })
  );
}

/** Share of a matrix's rows that belongs to key/value heads. */
const copiedShare = (matrix, kvHeads) =>
  sized(matrix.copied, kvHeads) / sized(matrix.rows, kvHeads);

/** A chip's part of what `chips` divide, where the share `copied` of it has so many parts. */
const chipPart = (whole, chips, copied, parts) =>
  (whole * (1 - copied)) / chips + (whole * copied) / Math.min(chips, parts);

// --- a step --------------------------------------------------------------------------------------

/** `count` sequences feed `queries` tokens each, the last of which sees `context` positions. */
function decodeWork(batch, context, drafts) {
  const numTokens = batch * (1 + drafts);
  return {
    numTokens,
    count: batch,
    queries: 1 + drafts,
    context: context + drafts,
    drafts,
    numLogits: numTokens,
  };
}

const prefillWork = (batch, context) => ({
  numTokens: batch * context,
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

function operation(name, layers, flops, parts) {
  const found = {
    name,
    layers,
    flops,
    weight_bytes: 0,
    cache_bytes: 0,
    activation_bytes: 0,
    split: true,
    cache_parts: 1,
    copied: 0,
    kind: "other",
    by_expert: false,
    rows: Infinity,
    sequences: 1,
    ...parts,
  };
  found.bytes = found.weight_bytes + found.cache_bytes + found.activation_bytes;
  found.intensity = found.bytes ? flops / found.bytes : 0;
  return found;
}

/** Every operation of one step. */
function stepOperations(d, work) {
  const { model, rest } = d,
    { numTokens, numLogits } = work;
  const D = model.width,
    V = model.vocab_size,
    table = tableElements(model);
  const lookedUp = bytesFor(rest, numTokens * D, D);
  return [
    ...model.matrices.map((matrix) => product(d, matrix, numTokens)),
    ...model.mixing.map((mixer) => (mixer.recurrent ? recur : attend)(d, mixer, work)),
    operation("head", 1, 2 * numLogits * table, {
      weight_bytes: bytesFor(rest, table, D),
      activation_bytes: bytesFor(rest, numLogits * D, D) + 2 * 4 * numLogits * V,
      rows: numLogits,
    }),
    operation("embed", 1, 0, {
      weight_bytes: (model.tied ? 0 : lookedUp) + (model.position_elements ? lookedUp : 0),
      activation_bytes: lookedUp,
      split: false,
    }),
    operation("vectors", 1, 0, {
      weight_bytes: bytesFor(rest, sized(model.vector_elements, d.kvHeads), D),
      split: false,
    }),
  ].map((found) => ({ ...found, sequences: work.count }));
}

function product(d, matrix, numTokens) {
  const { layers, width } = matrix,
    rows = sized(matrix.rows, d.kvHeads);
  const visited = numTokens * copiesPerToken(matrix),
    touched = copiesTouched(matrix, numTokens);
  return operation(matrix.name, layers, 2 * layers * visited * rows * width, {
    weight_bytes: bytesFor(d.weights, layers * touched * rows * width, width),
    activation_bytes: bytesFor(d.rest, layers * visited * (rows + width), width),
    split: matrix.split,
    rows: touched ? visited / touched : 0,
    copied: copiedShare(matrix, d.kvHeads),
    cache_parts: d.kvHeads,
    kind: "matrix",
    by_expert: Boolean(matrix.experts),
  });
}

function attend(d, mixer, work) {
  const { latent, indexer, window, layers } = mixer;
  const heads = d.model.num_heads,
    indexWidth = indexer ? indexer.head_width : 0;
  let row = d.model.head_width,
    flopsPerPair = 4 * heads * row,
    queriesWidth = 2 * heads * row;
  if (latent) {
    row = latent.rank + latent.rope_width;
    flopsPerPair = 2 * heads * (latent.rank + row);
    queriesWidth = heads * (latent.rank + row);
  }
  const length = work.context - work.queries;
  const live = work.context - (window === null ? 0 : Math.max(0, length + 1 - window));
  let pairs = pairsOf(work, window),
    chosen = live,
    scored = 0,
    flops = 0;
  if (indexer) {
    flops += work.count * pairs * 2 * indexer.num_heads * indexWidth;
    pairs = pairsOf(work, Math.min(window ?? indexer.top_k, indexer.top_k));
    chosen = Math.min(live, work.queries * indexer.top_k);
    scored = work.count * live;
  }
  let perRow = pairs * flopsPerPair;
  if (latent) perRow = Math.min(perRow, expandedFlops(latent, heads, work, pairs));
  flops += work.count * perRow;
  const stored = sized(mixer.elements, d.kvHeads);
  let elements = work.count * chosen * (stored - indexWidth) + scored * indexWidth;
  if (!mixer.shares) elements += work.count * work.queries * stored;
  return operation(mixer.name, layers, layers * flops, {
    cache_bytes: layers * bytesFor(d.cache, elements, row),
    activation_bytes: layers * bytesFor(d.rest, work.numTokens * queriesWidth, row),
    cache_parts: sized(mixer.parts, d.kvHeads),
    kind: "attention",
  });
}

/** Attention over keys and values projected out of the latent vectors. */
function expandedFlops(
  { rank, nope_width: nope, rope_width: rope, value_width: value },
  heads,
  work,
  pairs,
) {
  return (
    pairs * 2 * heads * (nope + rope + value) +
    (work.context - work.queries) * 2 * heads * (nope + value) * rank
  );
}

function recur(d, { recurrent: sizes, layers, name, parts }, work) {
  const perToken =
    6 * sizes.inner_width * sizes.state_width + 2 * sizes.conv_width * sizes.conv_channels;
  const channels = sizes.conv_channels + sizes.inner_width;
  return operation(name, layers, layers * work.count * work.queries * perToken, {
    cache_bytes: layers * work.count * (2 + work.drafts) * 4 * sizes.state_elements,
    activation_bytes: layers * bytesFor(d.rest, work.numTokens * channels, channels),
    cache_parts: sized(parts, d.kvHeads),
  });
}

/** Bytes of a sequence of `length` tokens: what windows keep, and states; `chips` divide them. */
function cacheBytes(d, length, chips = 1) {
  return sum(d.model.caches, ({ layers, elements, row, window, state_elements: state, parts }) => {
    const tokens = window === null ? length : Math.min(length, window);
    const perToken = bytesFor(d.cache, sized(elements, d.kvHeads), row);
    const held = layers * (tokens * perToken + state * 4 * (1 + d.drafts));
    return held / Math.min(chips, sized(parts, d.kvHeads));
  });
}

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

/** Share of a group's sequences that the fullest chip along `expert` works for. */
const fullest = (sequences, mesh) => Math.ceil(sequences / mesh.expert) / sequences;

/** A chip's part of an operation. */
function perChip({ mesh }, found) {
  const heads = found.split ? mesh.model : 1;
  const isDivided = found.by_expert;
  const part = (whole) => chipPart(whole, heads, found.copied, found.cache_parts);
  const share = isDivided ? 1 / mesh.expert : fullest(found.sequences, mesh);
  const flops = part(found.flops) * share;
  const weight_bytes = part(found.weight_bytes) / (isDivided ? mesh.expert : 1);
  const cache_bytes = (found.cache_bytes / Math.min(heads, found.cache_parts)) * share;
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
    { attention_share: share, half_rows: half } = d.hardware;
  if (found.kind === "attention") {
    const bytes = done.weight_bytes + done.cache_bytes / share + done.activation_bytes;
    return { bytes, flops: done.flops / share };
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
  let memory = 0,
    compute = 0;
  for (const found of stepOperations(d, work)) {
    const done = asReached(d, found);
    memory += done.bytes / bandwidthOf(d);
    compute += done.flops / rateFor(d, found);
  }
  const { overhead_s: overhead, gamma } = d.hardware,
    exchanged = collectiveSeconds(d, work);
  const hidden = Math.max(memory, compute) + gamma * Math.min(memory, compute);
  return timed(memory, compute, exchanged, overhead, overhead + hidden + exchanged);
}

function collectiveSeconds({ model, mesh, hardware, rest }, { numTokens, count }) {
  if (mesh.model * mesh.expert === 1 || !hardware.link_bandwidth) return 0;
  const activations =
    bytesFor(rest, numTokens * model.width, model.width) * fullest(count, mesh);
  const seconds = (moved, chips, passes) =>
    ((passes * (chips - 1)) / chips) * ((moved * hardware.link_axes) / hardware.link_bandwidth) +
    passes * (chips - 1) * hardware.link_latency_s;
  return (
    model.exchanges * seconds(activations, mesh.model, 2) +
    sum(
      model.mixtures,
      ({ layers, top_k: visited }) => 2 * layers * seconds(activations * visited, mesh.expert, 1),
    )
  );
}

/** Weights and the caches of `numRead` sequences once; two FLOPs a parameter and token. */
function lectureCost(d, numTokens, numRead, context) {
  const cached = cacheBytes({ ...d, drafts: 0 }, context, d.mesh.model);
  const bytes = chipWeightBytes(d) + Math.ceil(numRead / d.numGroups) * cached;
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
  decodeWork(Math.ceil(batch / d.mesh.data), context, d.drafts);
const prefillOf = (d, batch, context) => prefillWork(Math.ceil(batch / d.mesh.data), context);

/** Time of one decode step; where there are drafts it verifies them. */
function decodeTime(d, batch, context) {
  if (!d.lecture) return exactTime(d, decodeOf(d, batch, context));
  const found = lectureTime(d, batch * (1 + d.drafts), batch, context);
  return { ...found, total_s: found.memory_s };
}

function prefillTime(d, batch, context) {
  if (!d.lecture) return exactTime(d, prefillOf(d, batch, context));
  return lectureTime(d, batch * context, 0, context);
}

// --- a plan --------------------------------------------------------------------------------------

/** FLOPs a byte of a decode step, as the accounting counts both. */
function intensityOf(d, batch, context, operations) {
  const counted = d.lecture
    ? [lectureCost(d, batch * (1 + d.drafts), batch, context)]
    : operations;
  return sum(counted, (o) => o.flops) / sum(counted, (o) => o.bytes);
}

/** (1 - a^(k+1)) / (1 - a) */
function expectedTokens(acceptance, drafts) {
  let found = 0;
  for (let n = 0; n <= drafts; n++) found += acceptance ** n;
  return found;
}

/**
 * The point of `batch` prompts of `context` tokens that grow by `new_tokens`. Bytes are of a whole
 * replica unless they are a chip's, rates of all replicas.
 */
function plan(catalog, input) {
  const d = deployment(catalog, input),
    { hardware, mesh } = d;
  const { batch, context } = input,
    newTokens = input.new_tokens ?? 0;
  const middle = context + Math.floor(newTokens / 2),
    longest = context + newTokens;
  const held = weightBytes(d) * d.models,
    cached = batch * cacheBytes(d, longest) * d.models;
  const capacity = hardware.memory_bytes ?? Infinity;
  const chipHeld = chipWeightBytes(d) * d.models,
    room = capacity - chipHeld;
  const chipSequence = cacheBytes(d, longest, mesh.model) * d.models;
  const chipCached = Math.ceil(batch / d.numGroups) * chipSequence;
  const decode = decodeTime(d, batch, middle),
    prefill = prefillTime(d, batch, context);
  const perStep = expectedTokens(d.acceptance, d.drafts);
  const plain = d.drafts ? decodeTime({ ...d, drafts: 0 }, batch, middle).total_s : 0;
  const draft = d.drafts * d.draftCost * plain,
    step = decode.total_s + draft;
  const perToken = step / perStep,
    rate = (d.replicas * batch) / perToken;
  const decoding = stepOperations(d, decodeOf(d, batch, middle));
  const price = hardware.price_per_hour ?? null;
  return {
    batch,
    context,
    parameters: numParameters(d),
    weight_bytes: held,
    cache_bytes: cached,
    memory_bytes: held + cached,
    fits: chipCached <= room,
    step_s: step,
    ttft_s: prefill.total_s,
    output_tok_s: rate,
    request_s: newTokens ? prefill.total_s + (newTokens - 1) * perToken : null,
    intensity: intensityOf(d, batch, middle, decoding),
    bound: decode.bound,
    dollars_per_million:
      price === null ? null : ((price * d.numChips * d.replicas) / 3600 / rate) * 1e6,
    tpot_s: perToken,
    chip_bytes: chipHeld + chipCached,
    largest_batch: d.numGroups * Math.max(0, Math.floor(room / chipSequence)),
    chip_weight_bytes: chipHeld,
    chip_sequence_bytes: chipSequence,
    memory_room: room,
    tokens_per_step: perStep,
    ridge: (rateOf(hardware, d.weights.compute) * hardware.rate_share) / bandwidthOf(d),
    decode,
    prefill,
    decode_operations: decoding,
    prefill_operations: stepOperations(d, prefillOf(d, batch, context)),
    // what the pictures need beside the planner's own figures
    chip_cache_bytes: chipCached,
    capacity_bytes: capacity,
    draft_s: draft,
    on_fullest: Math.ceil(batch / d.numGroups),
    deployment: d,
  };
}

// --- what may be asked ---------------------------------------------------------------------------

const divisors = (n) => Array.from({ length: n }, (_, i) => i + 1).filter((i) => n % i === 0);

/** Chips that can divide each layer, as configs/mesh.py says; without links there is one. */
function validChips(model, hardware, kvHeads) {
  if (!hardware.link_bandwidth) return [1];
  return divisors(model.num_heads).filter(
    (chips) =>
      model.divided.every((size) => size % chips === 0) &&
      (!model.has_kv_heads || kvHeads % chips === 0 || chips % kvHeads === 0),
  );
}

/** Chips that can divide the experts of every mixture. */
function validExperts(model, hardware) {
  const sizes = model.mixtures.map((mixture) => mixture.num_experts);
  if (!sizes.length || !hardware.link_bandwidth) return [1];
  return divisors(sizes[0]).filter((n) => sizes.every((size) => size % n === 0));
}
