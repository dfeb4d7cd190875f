// The tools that a conversation offers: a dialog for their JSON, and how the model has to use them.

import { NotJson, readPrefix } from "./partial_json.js";
import { make } from "./text.js";

const at = (id) => document.getElementById(id);
const MAX_TOOLS = 64;
const FORM = '[{"type": "function", "function": {"name": ..., "parameters": {...}}}]';
const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

let offered = []; // as OpenAI's API has them
let text = ""; // that they were read from

/** The place of a character, as editors count. */
function placeOf(text, index) {
  const lines = text.slice(0, index).split("\n");
  return `line ${lines.length}, column ${lines.at(-1).length + 1}`;
}

function parse(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    try {
      readPrefix(text);
    } catch (place) {
      if (place instanceof NotJson) throw Error(`${placeOf(text, place.index)}: ${place.message}`);
    }
    throw Error(`${placeOf(text, text.length)}: the text ends early; close its brackets and quotes`);
  }
}

/** Throws an error that says what is wrong with a tool at a place. */
function checkTool(tool, place) {
  if (!isObject(tool)) throw Error(`${place}: must be an object, as in ${FORM}`);
  if (tool.type !== "function") throw Error(`${place}.type: must be "function"`);
  if (!isObject(tool.function)) throw Error(`${place}.function: must be an object with a name`);
  const { name, parameters } = tool.function;
  if (typeof name !== "string" || !/^[a-zA-Z0-9_-]{1,64}$/.test(name))
    throw Error(`${place}.function.name: must be 1 to 64 of a-z, A-Z, 0-9, _ and -`);
  if (parameters === undefined || parameters === null) return;
  if (!isObject(parameters) || (parameters.type ?? "object") !== "object")
    throw Error(`${place}.function.parameters: must be a JSON schema of type "object"`);
}

/** The tools of a text; throws an error that says where it is wrong and what would be right. */
export function readTools(text) {
  if (!text.trim()) return [];
  const tools = parse(text);
  if (!Array.isArray(tools)) throw Error(`must be a list, as in ${FORM}`);
  if (tools.length > MAX_TOOLS) throw Error(`${tools.length} tools: must be at most ${MAX_TOOLS}`);
  const names = new Set();
  tools.forEach((tool, index) => {
    checkTool(tool, `tools[${index}]`);
    const { name } = tool.function;
    if (names.has(name)) throw Error(`tools[${index}].function.name: ${name} is there twice`);
    names.add(name);
  });
  return tools;
}

/** Fields of a request; behind results the model decides, or forced calls would never end. */
export function fields(followsResults) {
  if (!offered.length) return {};
  const choice = followsResults ? "auto" : at("tool_choice").value;
  const isNamed = choice.startsWith("function:");
  const name = choice.slice("function:".length);
  return {
    tools: offered,
    tool_choice: isNamed ? { type: "function", function: { name } } : choice,
  };
}

/** The schema of a function's arguments in a list of tools; undefined where it is not among them. */
export function schemaOf(tools, name) {
  const tool = tools.find((tool) => tool.function.name === name);
  return tool && (tool.function.parameters ?? { type: "object", additionalProperties: false });
}

// --- what is offered -----------------------------------------------------------------------------

function showOffered() {
  at("offered").replaceChildren(
    ...offered.map((tool) => {
      const item = make("li");
      item.append(make("code", "", tool.function.name));
      item.title = tool.function.description ?? "";
      return item;
    }),
  );
  at("offered").hidden = at("choice-control").hidden = offered.length === 0;
  at("edit-tools").textContent = offered.length ? "Edit tools" : "Offer tools";
  const chosen = at("tool_choice").value;
  at("named-choices").replaceChildren(
    ...offered.map(({ function: { name } }) => {
      const option = make("option", "", name);
      option.value = `function:${name}`;
      return option;
    }),
  );
  at("tool_choice").value = chosen;
  if (!at("tool_choice").value) at("tool_choice").value = "auto";
}

// --- the dialog ----------------------------------------------------------------------------------

/** The tools that are written, or null; says which, or what is wrong. */
function review() {
  const line = at("tools-status");
  let tools = null;
  try {
    tools = readTools(at("tools-text").value);
    const names = tools.map((tool) => tool.function.name);
    line.textContent = names.length ? `Offers ${names.join(", ")}.` : "Offers nothing.";
  } catch (error) {
    line.textContent = error.message;
  }
  line.classList.toggle("wrong", tools === null);
  at("tools-text").setAttribute("aria-invalid", tools === null);
  return tools;
}

/** Replaces the text so that the browser can undo it. */
function write(example) {
  at("tools-text").focus();
  at("tools-text").select();
  document.execCommand("insertText", false, example);
  at("tools-text").setSelectionRange(0, 0);
  at("tools-text").scrollTop = 0;
}

export function start() {
  for (const control of document.querySelectorAll("[data-example]"))
    control.addEventListener("click", () => write(at(control.dataset.example).textContent.trim()));
  at("edit-tools").addEventListener("click", () => {
    at("tools-text").value = text;
    review();
    at("tools-dialog").showModal();
  });
  at("tools-text").addEventListener("input", review);
  at("leave-tools").addEventListener("click", () => at("tools-dialog").close());
  at("tools-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const tools = review();
    if (tools === null) return at("tools-text").focus();
    offered = tools;
    text = at("tools-text").value;
    showOffered();
    at("tools-dialog").close();
  });
  showOffered();
}
