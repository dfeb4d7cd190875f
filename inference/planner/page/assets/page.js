"use strict";
// What the page shows of a plan, and what happens when something changes.

// --- figures -------------------------------------------------------------------------------------

/** A figure, its exact value beside the rounded one. */
function show(id, value, shown) {
  const [amount, unit] = [].concat(shown);
  at(id).value = value ?? "";
  at(id).innerHTML = escaped(amount) + (unit ? ` <span>${escaped(unit)}</span>` : "");
}

function showFigures(p) {
  const d = p.deployment,
    { mesh } = d,
    newTokens = newTokensOf(state),
    tokens = state.context + newTokens;
  show("step_s", p.step_s, scaled(p.step_s, SECONDS));
  at("step_note").textContent = d.drafts
    ? `${digits(p.tokens_per_step)} tokens a sequence`
    : "one token a sequence";
  show("ttft_s", p.ttft_s, scaled(p.ttft_s, SECONDS));
  at("ttft_note").textContent = `${digits(state.batch * state.context)} tokens read`;
  show("output_tok_s", p.output_tok_s, [digits(p.output_tok_s), "tok/s"]);
  at("rate_note").textContent = `${digits(1 / p.tpot_s)} a sequence`;
  show("bound", p.bound, WAITS[p.bound]);
  at("bound").style.color = `var(--${p.bound})`;
  at("bound_note").textContent = `${digits(p.intensity)} FLOPs a byte`;
  show("largest_batch", p.largest_batch, digits(p.largest_batch));
  at("largest_batch").style.color = p.fits ? "" : "var(--over)";
  at("batch_note").textContent = p.largest_batch
    ? `of ${d.samples > 1 ? `${digits(d.samples)} × ${digits(tokens)} tokens` : `${digits(tokens)} tokens each`}`
    : "the weights leave no room";
  const price = d.hardware.price_per_hour ?? null,
    cost = p.dollars_per_million;
  show(
    "dollars_per_million",
    cost,
    dollars(cost),
  );
  at("price_note").textContent = price === null ? "once a price is given" : `$${price} a chip-hour`;
  show("chip_weight_bytes", p.chip_weight_bytes, bytes(p.chip_weight_bytes));
  show("chip_cache_bytes", p.chip_cache_bytes, bytes(p.chip_cache_bytes));
  show("capacity_bytes", p.capacity_bytes, bytes(p.capacity_bytes));
  show("weight_bytes", p.weight_bytes, bytes(p.weight_bytes));
  show("cache_bytes", p.cache_bytes, bytes(p.cache_bytes));
  show("snapshot_bytes", p.snapshot_bytes, bytes(p.snapshot_bytes));
  at("memory_title").textContent =
    d.numChips > 1 ? `Memory of each of ${d.numChips} chips` : "Memory";
  at("all_chips").hidden = d.numChips === 1;
  at("links_note").hidden =
    groupChips(mesh) * mesh.expert <= (d.hardware.linked_chips ?? Infinity);
  at("links_note").textContent =
    `links join ${d.hardware.linked_chips} chips; this counts all as joined`;
  at("sequence_note").textContent =
    `${bytes(p.chip_sequence_bytes)} a sequence` +
    (d.samples > 1 ? `, ${bytes(p.chip_request_bytes)} a request` : "") +
    (p.snapshot_bytes ? `, ${bytes(p.chip_snapshot_bytes)} a snapshot of its states` : "");
  at("snapshots").hidden = !p.snapshot_bytes;
  const moved = p.decode.memory_s * bandwidthOf(d),
    chips = d.numChips > 1 ? "each chip moves" : "a decode step moves";
  const parts = [
    `moving takes ${seconds(p.decode.memory_s)}`,
    `computing ${seconds(p.decode.compute_s)}`,
  ];
  if (p.decode.collective_s) parts.push(`exchanging ${seconds(p.decode.collective_s)}`);
  const tokensOfStep = tokensFed(d, state.batch);
  const counted =
    `${digits(tokensOfStep)} token${tokensOfStep > 1 ? "s" : ""}` +
    (d.drafts ? ", drafts among them," : "");
  at("sentence").innerHTML =
    `For ${counted} ` +
    `${chips} ${bytes(moved)}: ${parts.join(", ")}. The step <b>waits for ${WAITS[p.bound]}</b>.` +
    mixtureOf(p);
  at("request_note").textContent = newTokens
    ? `${digits(Math.ceil(p.steps))} steps after the prefill; the longer part of an operation hides its shorter`
    : "the prefill alone";
}

/** What one request costs, and how long one sample could think meanwhile. */
function showRequest() {
  const hasTokens = newTokensOf(state) > 0;
  at("request").hidden = !hasTokens;
  if (!hasTokens) return;
  const cost = requestCost(CATALOG, state);
  const same = equalThinkingTokens(CATALOG, state);
  show("request_s", cost.seconds, scaled(cost.seconds, SECONDS));
  show("answer_s", cost.answer_s, scaled(cost.answer_s, SECONDS));
  show("chip_s", cost.chip_s, scaled(cost.chip_s, SECONDS));
  show("dollars", cost.dollars, dollars(cost.dollars));
  show("tokens", cost.tokens, digits(cost.tokens));
  show("request_bytes", cost.cache_bytes, bytes(cost.cache_bytes));
  show("cache_share", cost.cache_share, [digits(100 * cost.cache_share), "%"]);
  show("equal_thinking_tokens", same, digits(same));
}

/** What a step reads of a mixture, and a token of the model. */
function mixtureOf(p) {
  if (p.visited_experts === null) return "";
  const all = Math.max(...p.deployment.model.num_experts);
  const billions = (n) => (n / 1e9).toPrecision(3);
  return (
    ` Its tokens visit ${p.visited_experts.toPrecision(3)} of ${all} experts a layer; ` +
    `${billions(p.active_parameters)} of ${billions(p.parameters)} billion parameters work for each.`
  );
}

function showOperations(p) {
  const phases = ["decode", "prefill"],
    found = dots(p);
  const rows = p.decode_operations.map((operation, i) => [operation, p.prefill_operations[i]]);
  const cell = (value) => `<td>${value}</td>`;
  const share = (operation, phase) =>
    found.find((dot) => dot.found === operation && dot.phase === phase)?.share;
  at("operations").innerHTML =
    "<thead><tr><th></th>" +
    phases.map((phase) => `<th colspan="4">${phase}</th>`).join("") +
    "</tr><tr><th>operation</th>" +
    phases.map(() => "<th>FLOPs</th><th>bytes</th><th>FLOPs a byte</th><th>share</th>").join("") +
    "</tr></thead><tbody>" +
    rows
      .map(
        (pair) =>
          `<tr><th scope="row">${escaped(pair[0].name)}${pair[0].layers > 1 ? ` × ${pair[0].layers}` : ""}</th>` +
          pair
            .map(
              (operation, i) =>
                cell(operation.flops ? said(operation.flops, FLOPS).replace(" FLOP", "") : "0") +
                cell(bytes(operation.bytes)) +
                cell(digits(operation.intensity)) +
                cell(operation.flops ? percent(share(operation, phases[i])) : ""),
            )
            .join("") +
          "</tr>",
      )
      .join("") +
    "</tbody>";
}

function showCommand() {
  const model = CATALOG.models[state.model],
    flags = { ...state };
  const words = ["python -m scripts.plan"];
  const add = (flag, value) => words.push(`--${flag}=${value}`);
  for (const key of ["model", "hardware", "batch", "context", "new_tokens"]) add(key, flags[key]);
  if (state.weights !== model.dtype) add("weights", state.weights);
  if (state.cache !== model.dtype) add("cache", state.cache);
  if (state.kv_heads !== model.kv_heads) add("set", `model.pattern.mixer.num_kv_heads=${state.kv_heads}`);
  const mesh = [
    ["model", state.chips],
    ["expert", state.expert],
    ["context", state.context_chips],
  ].filter(([, n]) => n > 1);
  if (mesh.length) add("mesh", mesh.map((axis) => axis.join("=")).join(","));
  if (state.replicas > 1) add("replicas", state.replicas);
  if (state.price !== null) add("price", state.price);
  if (state.samples > 1) add("samples", state.samples);
  if (state.thinking_tokens) add("thinking_tokens", state.thinking_tokens);
  if (state.drafts) add("speculate", [state.drafts, state.acceptance, state.draft_cost].join(","));
  if (state.accounting !== "exact") add("accounting", state.accounting);
  at("command").textContent = words.join(" ");
}

// --- pictures ------------------------------------------------------------------------------------

let curves = null;

function put(id, { height, markup }, about) {
  at(id).setAttribute("height", height);
  at(id).setAttribute("aria-label", about);
  at(id).innerHTML = markup;
}

function showPictures(p) {
  const width = (id) => at(id).parentElement.clientWidth;
  put(
    "memory",
    drawMemory(p, width("memory")),
    `Of a chip's ${bytes(p.capacity_bytes)} weights take ${bytes(p.chip_weight_bytes)}, the cache ${bytes(p.chip_cache_bytes)}`,
  );
  put(
    "roofline",
    drawRoofline(p, width("roofline")),
    `Roofline with its ridge at ${digits(p.ridge)} FLOPs a byte; the operations are listed in the table below`,
  );
  const most = Math.min(
    65536,
    2 ** Math.ceil(Math.log2(Math.max(64, 2 * p.batch, 2 * p.largest_batch))),
  );
  const points = batchLadder(most).map((batch) => plan(CATALOG, { ...state, batch }));
  curves = { ...drawCurves(p, points, width("curves")), points };
  put(
    "curves",
    curves,
    `At ${digits(p.batch)} requests ${digits(p.output_tok_s)} tokens a second in steps of ` +
      `${seconds(p.step_s)}; ${digits(p.largest_batch)} requests fit`,
  );
  put(
    "timeline",
    drawTimeline(p, newTokensOf(state), width("timeline")),
    `First token after ${seconds(p.ttft_s)}` +
      (p.request_s ? `, last after ${seconds(p.request_s)}` : ""),
  );
  if (p.request_s) {
    const costs = tradeOf(CATALOG, state);
    put(
      "trade",
      drawTrade(state, costs, width("trade")),
      `${digits(state.samples)} samples take ${seconds(p.request_s)}; ${turnOf(costs)}`,
    );
    at("trade_note").textContent = turnOf(costs);
  }
}

function pointed(event) {
  const from = at("curves").getBoundingClientRect().left,
    pixel = event.clientX - from;
  return curves.points.reduce((best, point) =>
    Math.abs(curves.x(point.batch) - pixel) < Math.abs(curves.x(best.batch) - pixel) ? point : best,
  );
}

function hover(event) {
  at("curves").querySelector(".hover")?.remove();
  const point = pointed(event),
    x = curves.x(point.batch);
  const marks = curves.panels.map(
    ({ key, y }) => `<circle class="dot decode memory" cx="${x}" cy="${y(point[key])}" r="4"/>`,
  );
  at("curves").insertAdjacentHTML(
    "beforeend",
    `<g class="hover" pointer-events="none">` +
      line(x, curves.top, x, curves.bottom, "thin") +
      marks.join("") +
      "</g>",
  );
  at("curve_note").textContent =
    `${digits(point.batch)} at once: ${digits(point.output_tok_s)} tok/s, step ${seconds(point.step_s)}`;
}

function leave() {
  at("curves").querySelector(".hover")?.remove();
  at("curve_note").textContent = "click to choose a batch";
}

function refresh() {
  const p = plan(CATALOG, state);
  showControls();
  showFigures(p);
  showRequest();
  showOperations(p);
  showCommand();
  showPictures(p);
}

state = readAddress();
buildControls();
refresh();
at("curves").addEventListener("pointermove", hover);
at("curves").addEventListener("pointerleave", leave);
at("curves").addEventListener("click", (event) => change({ batch: pointed(event).batch }));
addEventListener("hashchange", () => {
  state = readAddress();
  refresh();
});
let resizing = null;
addEventListener("resize", () => {
  cancelAnimationFrame(resizing);
  resizing = requestAnimationFrame(refresh);
});
