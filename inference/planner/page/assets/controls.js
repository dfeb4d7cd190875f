"use strict";
// The page's state and the controls that change it. The state lives in the address.

const CATALOG = JSON.parse(document.getElementById("catalog").textContent);
const at = (id) => document.getElementById(id);
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const WAITS = {
  memory: "memory",
  compute: "arithmetic",
  collectives: "exchange",
  overhead: "overhead",
};

// --- state ---------------------------------------------------------------------------------------

/** What a model starts with. */
function defaults(modelName) {
  const model = CATALOG.models[modelName];
  return {
    batch: 32,
    context: Math.min(2048, Math.ceil(model.max_context / 2)),
    new_tokens: 256,
    samples: 1,
    thinking_tokens: 0,
    kv_heads: model.kv_heads,
    weights: model.dtype,
    cache: model.dtype,
    chips: 1,
    expert: 1,
    context_chips: 1,
    replicas: 1,
    price: null,
    drafts: 0,
    acceptance: 0.8,
    draft_cost: 0.1,
    accounting: "exact",
  };
}

const known = (name, names, otherwise = names[0]) => (names.includes(name) ? name : otherwise);
const nearestBelow = (list, value) => list.filter((v) => v <= value).at(-1) ?? list[0];

/** A wish made possible: names that exist, sizes that divide, lengths that the model has. */
function settled(wish) {
  const model = known(wish.model, Object.keys(CATALOG.models));
  const hardware = known(wish.hardware, Object.keys(CATALOG.hardware));
  const config = CATALOG.models[model],
    base = defaults(model),
    state = { model, hardware };
  const formats = Object.keys(CATALOG.formats);
  const whole = (key, low, high) => clamp(Math.round(wish[key] ?? base[key]), low, high);
  state.batch = whole("batch", 1, 65536);
  state.new_tokens = whole("new_tokens", 0, config.max_context - 1);
  state.thinking_tokens = whole("thinking_tokens", 0, config.max_context - 1 - state.new_tokens);
  state.samples = whole("samples", 1, 4096);
  state.context = whole("context", 1, config.max_context - newTokensOf(state));
  state.kv_heads = nearestBelow(divisors(config.most_kv_heads), wish.kv_heads ?? base.kv_heads);
  state.weights = known(wish.weights, formats, base.weights);
  state.cache = known(wish.cache, Object.keys(CATALOG.cache_formats), base.cache);
  state.chips = nearestBelow(
    validChips(config, CATALOG.hardware[hardware], state.kv_heads),
    wish.chips ?? 1,
  );
  state.expert = nearestBelow(validExperts(config, CATALOG.hardware[hardware]), wish.expert ?? 1);
  state.context_chips = nearestBelow(
    validContexts(config, CATALOG.hardware[hardware], state.chips),
    wish.context_chips ?? 1,
  );
  state.replicas = whole("replicas", 1, 4096);
  state.price = wish.price > 0 ? wish.price : null;
  state.drafts = whole("drafts", 0, 16);
  state.acceptance = clamp(wish.acceptance ?? base.acceptance, 0, 1);
  state.draft_cost = clamp(wish.draft_cost ?? base.draft_cost, 0, 1);
  state.accounting = known(wish.accounting, ["exact", "lecture"], base.accounting);
  return state;
}

const TEXTS = ["model", "hardware", "weights", "cache", "accounting"];
const ALWAYS = ["model", "hardware", "batch", "context", "new_tokens"];

function readAddress() {
  const wish = { ...CATALOG.start };
  for (const [key, value] of new URLSearchParams(location.hash.slice(1))) {
    if (TEXTS.includes(key)) wish[key] = value;
    else if (value !== "" && Number.isFinite(Number(value))) wish[key] = Number(value);
  }
  return settled(wish);
}

function address(state) {
  const base = defaults(state.model);
  const kept = Object.entries(state).filter(
    ([key, value]) => value !== null && (ALWAYS.includes(key) || value !== base[key]),
  );
  return "#" + new URLSearchParams(kept);
}

let state = null,
  saving = null;

function change(wish) {
  if (wish.model !== undefined && wish.model !== state.model) {
    const { kv_heads, weights, cache } = defaults(wish.model);
    const own = CATALOG.models[state.model].dtype; // formats that nobody chose follow the model
    wish = {
      ...wish,
      kv_heads,
      weights: state.weights === own ? weights : state.weights,
      cache: state.cache === own ? cache : state.cache,
    };
  }
  state = settled({ ...state, ...wish });
  refresh();
  clearTimeout(saving); // browsers limit how often an address may change
  saving = setTimeout(() => history.replaceState(null, "", address(state)), 150);
}

// --- controls ------------------------------------------------------------------------------------

/** 1, 2, 3, 4, 6, 8, 12 ... up to `most`. */
function ladder(most, ...before) {
  const found = [...before];
  for (let value = 1; value < most; value *= 2) {
    found.push(value);
    if (value > 1 && value * 1.5 < most) found.push(value * 1.5);
  }
  return [...found, most];
}

const config = () => CATALOG.models[state.model];
const chip = () => CATALOG.hardware[state.hardware];
const percent = (value) => `${Math.round(100 * value)} %`;
const GROUPS = [
  [
    "Model",
    [
      { key: "model", label: "Preset", options: () => Object.keys(CATALOG.models) },
      { key: "weights", label: "Weights", options: () => Object.keys(CATALOG.formats) },
      { key: "cache", label: "Cache", choices: () => Object.keys(CATALOG.cache_formats) },
      {
        key: "kv_heads",
        label: "Key/value heads",
        stops: () => divisors(config().most_kv_heads),
        off: () => config().most_kv_heads === 1,
        said: (v) => `${v} of ${config().most_kv_heads}`,
      },
    ],
  ],
  [
    "Hardware",
    [
      { key: "hardware", label: "Chip", options: () => Object.keys(CATALOG.hardware) },
      {
        key: "chips",
        label: "Chips that share each layer",
        stops: () => validChips(config(), chip(), state.kv_heads),
      },
      {
        key: "expert",
        label: "Chips that share experts",
        stops: () => validExperts(config(), chip()),
        hidden: () => !config().num_experts.length,
      },
      {
        key: "context_chips",
        label: "Chips that share contexts",
        stops: () => validContexts(config(), chip(), state.chips),
        hidden: () => !config().divides_context,
      },
      { key: "replicas", label: "Replicas", stops: () => ladder(64), typed: true },
      {
        key: "price",
        label: "Dollars a chip-hour",
        typed: true,
        placeholder: () => chip().price_per_hour ?? "",
      },
    ],
  ],
  [
    "Load",
    [
      { key: "batch", label: "Requests at once", stops: () => ladder(4096), typed: true },
      {
        key: "context",
        label: "Prompt tokens",
        stops: () => ladder(Math.min(2 ** 20, config().max_context - newTokensOf(state))),
        typed: true,
      },
      {
        key: "new_tokens",
        label: "New tokens",
        stops: () => ladder(Math.min(8192, config().max_context - 1), 0),
        typed: true,
      },
    ],
  ],
  [
    "Test-time compute",
    [
      { key: "samples", label: "Samples a request", stops: () => ladder(256), typed: true },
      {
        key: "thinking_tokens",
        label: "Thinking tokens",
        stops: () => ladder(Math.min(65536, config().max_context - 1 - state.new_tokens), 0),
        typed: true,
      },
    ],
  ],
  [
    "Speculation",
    [
      {
        key: "drafts",
        label: "Drafts a step",
        stops: () => Array.from({ length: 17 }, (_, k) => k),
        said: (v) => (v ? String(v) : "off"),
      },
      {
        key: "acceptance",
        label: "Accepted",
        stops: () => hundredths,
        off: () => !state.drafts,
        said: percent,
      },
      {
        key: "draft_cost",
        label: "A draft costs",
        stops: () => hundredths,
        off: () => !state.drafts,
        said: (v) => `${percent(v)} of a step`,
      },
    ],
  ],
  ["Accounting", [{ key: "accounting", label: "", choices: () => ["exact", "lecture"] }]],
];
const hundredths = Array.from({ length: 101 }, (_, n) => n / 100);
const CONTROLS = GROUPS.flatMap(([, items]) => items);

function controlMarkup({ key, label, options, choices, stops, typed }) {
  const name = escaped(label);
  if (options) {
    const all = options()
      .map((option) => `<option>${escaped(option)}</option>`)
      .join("");
    return `<div class="control" data-control="${key}"><label for="${key}">${name}</label><select id="${key}">${all}</select></div>`;
  }
  if (choices) {
    const all = choices()
      .map(
        (choice) =>
          `<label><input type="radio" name="${key}" value="${choice}">` +
          `${typeName(choice)}</label>`,
      )
      .join("");
    return (
      `<div class="control wide" data-control="${key}">${label && `<span class="label">${name}</span>`}` +
      `<div class="choices" role="radiogroup" aria-label="${name || "Accounting"}">${all}</div></div>`
    );
  }
  const value = typed
    ? `<input type="number" id="${key}${stops ? "-typed" : ""}" ${stops ? `aria-label="${name}"` : 'min="0" step="any"'}>`
    : `<output id="${key}-said" for="${key}"></output>`;
  const range = stops ? `<input type="range" id="${key}" min="0" step="1">` : "";
  return `<div class="control" data-control="${key}"><label for="${key}">${name}</label>${value}${range}</div>`;
}

function buildControls() {
  at("controls").innerHTML = GROUPS.map(
    ([title, items]) =>
      `<fieldset><legend>${title}</legend>${items.map(controlMarkup).join("")}</fieldset>`,
  ).join("");
  for (const { key, options, choices, stops, typed } of CONTROLS) {
    if (options) at(key).addEventListener("input", () => change({ [key]: at(key).value }));
    if (choices) {
      document
        .querySelectorAll(`input[name="${key}"]`)
        .forEach((radio) => radio.addEventListener("input", () => change({ [key]: radio.value })));
    }
    if (stops) at(key).addEventListener("input", () => change({ [key]: stops()[at(key).value] }));
    if (typed) {
      const field = at(stops ? `${key}-typed` : key);
      field.addEventListener("input", () => {
        if (field.value !== "" || !stops)
          change({ [key]: field.value === "" ? null : Number(field.value) });
      });
      field.addEventListener("change", refresh);
    }
  }
}

function showControls() {
  for (const { key, options, choices, stops, typed, said, off, hidden, placeholder } of CONTROLS) {
    const value = state[key],
      box = document.querySelector(`[data-control="${key}"]`);
    box.hidden = hidden ? hidden() : false;
    box.classList.toggle("off", off ? off() : false);
    if (options) at(key).value = value;
    if (choices) document.querySelector(`input[name="${key}"][value="${value}"]`).checked = true;
    if (stops) {
      const list = stops(),
        range = at(key);
      const index = list.findIndex((stop) => stop >= value);
      range.max = list.length - 1;
      range.value = index < 0 ? list.length - 1 : index;
      range.disabled = (off && off()) || list.length < 2;
      range.setAttribute("aria-valuetext", said ? said(value) : String(value));
      if (!typed) at(`${key}-said`).textContent = said ? said(value) : value;
    }
    if (typed) {
      const field = at(stops ? `${key}-typed` : key);
      if (document.activeElement !== field) field.value = value ?? "";
      if (placeholder) field.placeholder = placeholder();
    }
  }
}
