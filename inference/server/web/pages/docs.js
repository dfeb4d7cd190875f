// Shows openapi.json: operations with an example and their fields, then the objects that these name.

const KEY = "ridgeline.key"; // the console's, of this tab
const THEME = "ridgeline.theme";
const PREFIX = "#/components/schemas/";

const element = (name, properties = {}, ...children) => {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
};
const find = (selector) => document.querySelector(selector);
const anchor = (name) => name.replace(/[^A-Za-z0-9]+/g, "-");

// --- descriptions: of an object, and of its fields, as the docstring of one has both --------------

function read(description = "") {
  const [about, rest = ""] = description.split(/\n\s*Attributes:\n/);
  const fields = {};
  let names = [];
  for (const line of rest.split("\n")) {
    const begun = /^\s*([a-z_]+(?:, [a-z_.]+)*): (.*)$/.exec(line);
    if (begun) {
      names = begun[1].split(", ");
      for (const name of names) fields[name] = begun[2];
    } else {
      for (const name of names) fields[name] += " " + line.trim();
    }
  }
  return { about: about.replace(/^(?:POST|GET) \S+\s*/, "").replace(/\s+/g, " ").trim(), fields };
}

// --- types in words, with links to objects --------------------------------------------------------

const WORDS = { string: "text", integer: "whole number", number: "number", boolean: "true or false", array: "list", object: "object", null: "null" };
const HUGE = 2 ** 31 - 1; // a bound of numbers as they are kept, of no interest to people

function range(schema) {
  const said = [];
  const near = (bound) => (Math.abs(bound) < HUGE ? bound : undefined);
  const minimum = near(schema.minimum), maximum = near(schema.maximum);
  const { exclusiveMinimum, exclusiveMaximum } = schema;
  if (minimum !== undefined && maximum !== undefined) said.push(`${minimum} to ${maximum}`);
  else if (minimum !== undefined) said.push(`from ${minimum}`);
  else if (maximum !== undefined) said.push(`up to ${maximum}`);
  if (exclusiveMinimum !== undefined) said.push(`above ${exclusiveMinimum}`);
  if (exclusiveMaximum !== undefined) said.push(`below ${exclusiveMaximum}`);
  for (const [unit, least, most] of [
    ["characters", schema.minLength, schema.maxLength],
    ["entries", schema.minItems, schema.maxItems],
    ["names", schema.minProperties, schema.maxProperties],
  ]) {
    if (least !== undefined && most !== undefined) said.push(`${least} to ${most} ${unit}`);
    else if (least === 1) said.push("not empty");
    else if (least !== undefined) said.push(`at least ${least} ${unit}`);
    else if (most !== undefined) said.push(`at most ${most} ${unit}`);
  }
  if (schema.pattern) said.push(`matches ${schema.pattern}`);
  return said;
}

function type(schema, ending = "") {
  if (schema === undefined || schema === true || !Object.keys(schema).length) return ["anything"];
  if (schema.$ref) {
    const name = schema.$ref.slice(PREFIX.length);
    return [element("a", { href: `#${anchor(name)}` }, name)];
  }
  const options = schema.anyOf ?? schema.oneOf;
  if (options) {
    const shown = options.filter((each) => each.type !== "null");
    const parts = shown.flatMap((each, n) => (n ? [" or ", ...type(each, ending)] : type(each, ending)));
    return shown.length < options.length && !shown.length ? ["null"] : parts;
  }
  if (schema.enum) return [schema.enum.map((each) => JSON.stringify(each)).join(", ")];
  if ("const" in schema) return [JSON.stringify(schema.const)];
  const said = [schema.type === "boolean" ? WORDS.boolean : (WORDS[schema.type] ?? "anything") + ending];
  if (schema.type === "array" && schema.items) said.push(" of ", ...type(schema.items, "s"));
  if (schema.type === "object" && typeof schema.additionalProperties === "object") {
    said.push(" of ", ...type(schema.additionalProperties, "s"));
  }
  const limits = range(schema);
  if (limits.length) said.push(element("span", { className: "soft" }, `, ${limits.join(", ")}`));
  return said;
}

// --- tables of fields -----------------------------------------------------------------------------

function fields(schema) {
  const { about, fields: told } = read(schema.description);
  const found = [];
  if (about) found.push(element("p", {}, about));
  if (!schema.properties) {
    if (schema.anyOf || schema.oneOf) found.push(element("p", {}, ...type(schema)));
    return found;
  }
  const rows = Object.entries(schema.properties).map(([name, own]) => {
    const first = element("td", {}, element("code", {}, name));
    if (schema.required?.includes(name)) first.append(element("span", { className: "required" }, "required"));
    const isTold = own.default !== undefined && own.default !== null && typeof own.default !== "object";
    const more = isTold ? ` Default: ${JSON.stringify(own.default)}.` : "";
    return element("tr", {}, first, element("td", {}, ...type(own)), element("td", {}, (told[name] ?? own.description ?? "") + more));
  });
  const head = element("tr", {}, ...["Field", "Type", "Meaning"].map((each) => element("th", { scope: "col" }, each)));
  found.push(element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
  return found;
}

// --- operations -----------------------------------------------------------------------------------

function command(path, method, operation, needsKey) {
  const id = path.startsWith("/v1/models") ? "MODEL" : "ID";
  const url = new URL(path.replace("{id}", id), location.href).href;
  const parts = [`curl ${url}`];
  if (needsKey) parts.push('-H "Authorization: Bearer $KEY"');
  const content = operation.requestBody?.content ?? {};
  const example = content["application/json"]?.example;
  if (method === "delete" || (method === "post" && !operation.requestBody)) {
    parts.push(`-X ${method.toUpperCase()}`);
  }
  if (content["multipart/form-data"]) parts.push("-F purpose=batch", "-F file=@requests.jsonl");
  if (example) {
    const body = JSON.stringify(example, null, 2).replaceAll("'", "'\\''").replaceAll("\n", "\n  ");
    parts.push('-H "Content-Type: application/json"', `-d '${body}'`);
  }
  return parts.join(" \\\n  ");
}

function copyable(text) {
  const button = element("button", { type: "button" }, "Copy");
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return element("div", { className: "example" }, element("pre", {}, element("code", {}, text)), button);
}

// --- a call from this page ------------------------------------------------------------------------

const MOST_CHARS = 1 << 16; // of an answer that are shown

async function send(path, method, body, show, signal) {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  if (body !== undefined) headers["content-type"] = "application/json";
  const answer = await fetch(path.slice(1), { method, headers, body, signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let said = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (!done) said += value;
    const whole = done && answer.headers.get("content-type") === "application/json" ? pretty(said) : said;
    show(`${answer.status} ${answer.statusText}\n${whole.slice(0, MOST_CHARS)}`);
    if (done) return;
    if (said.length > MOST_CHARS) {
      await reader.cancel();
      return;
    }
  }
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** A body to edit, a button that sends it, and the answer as it comes. */
function trial(path, method, operation) {
  const example = operation.requestBody?.content["application/json"]?.example;
  const address = element("input", { value: path, hidden: !path.includes("{"), spellcheck: false, ariaLabel: `path of ${path}` });
  const body = element("textarea", { value: example ? JSON.stringify(example, null, 2) : "", rows: 8, hidden: !example, spellcheck: false, ariaLabel: `body for ${path}` });
  const button = element("button", { type: "submit" }, "Send");
  const answer = element("pre", { hidden: true, tabIndex: 0 });
  answer.setAttribute("role", "status");
  const form = element("form", {}, address, body, button, answer);
  let running = null;
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (running) {
      running.abort();
      return;
    }
    running = new AbortController();
    button.textContent = "Stop";
    const show = (text) => Object.assign(answer, { hidden: false, textContent: text });
    show("waiting for the answer");
    try {
      await send(address.value, method.toUpperCase(), example && body.value, show, running.signal);
    } catch (error) {
      if (error.name !== "AbortError") show(`no answer: ${error.message}`);
      else answer.append("\n(stopped)");
    }
    running = null;
    button.textContent = "Send";
  });
  return element("details", { className: "trial" }, element("summary", {}, "Try it"), form);
}

function content(title, described, schemas) {
  return Object.entries(described ?? {}).flatMap(([media, { schema }]) => {
    const name = schema.$ref?.slice(PREFIX.length);
    const isStream = media === "text/event-stream";
    const heading = element("h3", {}, isStream ? "Each event of a stream" : title);
    const options = schema.anyOf?.filter((each) => !each.$ref?.endsWith("/ErrorBody"));
    if (options) return [heading, element("p", {}, ...type({ anyOf: options }))];
    return [heading, ...(name ? fields(schemas[name]) : fields(schema))];
  });
}

function section(path, method, operation, schemas, needsKey) {
  const id = anchor(`${method} ${path}`);
  const heading = element("h2", {}, element("span", { className: `method ${method}` }, method.toUpperCase()), path);
  const link = element("a", { href: `#${id}` }, element("span", { className: `method ${method}` }, method.toUpperCase()), path);
  const body = element(
    "section", { id }, heading, element("p", {}, operation.summary),
    copyable(command(path, method, operation, needsKey)),
    ...(operation.requestBody?.content["multipart/form-data"] ? [] : [trial(path, method, operation)]),
    ...content("Fields", operation.requestBody?.content, schemas),
    ...content("Answer", operation.responses["200"].content, schemas),
  );
  return [link, body];
}

function show(described, needsKey) {
  const schemas = described.components.schemas;
  const nav = find("nav"), main = find("main");
  nav.replaceChildren();
  main.replaceChildren();
  const operations = Object.entries(described.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => [path, method, operation]),
  );
  const isPost = ([, method]) => method === "post";
  for (const one of [...operations.filter(isPost), ...operations.filter((each) => !isPost(each))]) {
    const [link, body] = section(...one, schemas, needsKey);
    nav.append(link);
    main.append(body);
  }
  nav.append(element("h2", {}, "Objects"));
  for (const [name, schema] of Object.entries(schemas)) {
    nav.append(element("a", { href: `#${anchor(name)}` }, name));
    main.append(element("section", { id: anchor(name) }, element("h2", {}, name), ...fields(schema)));
  }
  if (location.hash) find(`[id="${CSS.escape(location.hash.slice(1))}"]`)?.scrollIntoView();
}

// --- the key, where the server asks for one -------------------------------------------------------

async function load() {
  const key = sessionStorage.getItem(KEY);
  const answer = await fetch("openapi.json", { headers: key ? { authorization: `Bearer ${key}` } : {} });
  const found = await answer.json();
  const problem = find("#problem");
  problem.textContent = answer.ok ? "" : found.error.message;
  problem.hidden = answer.ok;
  find("#key").hidden = answer.status !== 401 && key === null;
  if (answer.ok) show(found, key !== null);
}

document.documentElement.dataset.theme = sessionStorage.getItem(THEME) ?? "";
find("#key").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, find("#key input").value);
  load();
});
load();
