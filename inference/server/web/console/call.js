// A call of a function as a card: its arguments as they come, whether they obey the function's
// schema, and the result that a user writes.

import { NotJson, readPrefix } from "./partial_json.js";
import { showValue } from "./rows.js";
import { check } from "./schema.js";
import { make } from "./text.js";

/** What JSON says so far, or null where it is no JSON. */
function read(text) {
  try {
    return readPrefix(text);
  } catch (error) {
    if (error instanceof NotJson || error instanceof RangeError) return null; // or too deep
    throw error;
  }
}

export class Call {
  result = null; // the text that went to the model
  #id = "";
  #name = "";
  #arguments = "";
  #schemaOf;

  /**
   * `schemaOf`: returns the schema of a function's arguments, undefined for functions that were not
   * offered; `entered`: called when a key ends a result; `changed`: when a result is edited.
   */
  constructor(schemaOf, { entered, changed }) {
    this.#schemaOf = schemaOf;
    this.element = make("section", "call waits");
    this.element.setAttribute("role", "group");
    this.title = make("h3");
    this.id = make("span", "call-id");
    this.verdict = make("span", "verdict", "arriving");
    const head = make("div", "call-head");
    head.append(this.title, this.verdict, this.id);
    this.rows = make("div", "arguments");
    this.problems = make("ul", "problems");
    this.problems.hidden = true;
    this.reply = make("div", "reply");
    this.reply.hidden = true;
    this.element.append(head, this.rows, this.problems, this.reply);
    this.field = make("textarea");
    this.field.rows = 1;
    this.field.spellcheck = false;
    this.field.addEventListener("input", changed);
    this.field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      entered();
    });
  }

  get isAnswered() {
    return this.field.value.trim() !== "";
  }

  /** Parts of messages: the call, and the result of it. */
  get request() {
    const called = { name: this.#name, arguments: this.#arguments };
    return { id: this.#id, type: "function", function: called };
  }

  get response() {
    return { role: "tool", tool_call_id: this.#id, content: this.result };
  }

  /** What a chunk says of it. */
  take({ id = "", function: { name = "", arguments: text = "" } = {} }) {
    this.#id ||= id;
    this.#name ||= name;
    this.#arguments += text;
    this.title.textContent = this.#name;
    this.id.textContent = this.id.title = this.#id;
    this.element.setAttribute("aria-label", `Call of ${this.#name}`);
    this.#showArguments();
  }

  /** Nothing more comes; `isWhole`: nothing was cut off. */
  end(isWhole) {
    this.element.classList.remove("waits");
    const [word, className, problems] = this.#judge(isWhole);
    this.verdict.textContent = word;
    this.verdict.classList.add(className);
    this.problems.replaceChildren(...problems.map((problem) => make("li", "", problem)));
    this.problems.hidden = problems.length === 0;
  }

  /** A field for the result. */
  ask() {
    const label = make("label", "", "Result");
    label.htmlFor = this.field.id = `result-${this.#id}`;
    this.field.setAttribute("aria-label", `Result of ${this.#name}`);
    this.field.placeholder = "text or JSON";
    this.reply.replaceChildren(label, this.field);
    this.reply.hidden = false;
  }

  /** The result as it goes to the model. */
  settle() {
    this.result = this.field.value;
    const shown = make("div");
    const json = /^\s*[[{]/.test(this.result) ? read(this.result) : null;
    showValue(shown, json && !json.isCut ? json.value : this.result);
    this.reply.replaceChildren(make("span", "", "Result"), shown);
  }

  #showArguments() {
    const json = read(this.#arguments);
    this.rows.classList.toggle("raw", json === null);
    showValue(this.rows, json ? json.value : this.#arguments);
  }

  #judge(isWhole) {
    if (!isWhole) return ["cut off", "unsure", []];
    const schema = this.#schemaOf(this.#name);
    if (schema === undefined) return ["not offered", "wrong", ["no function with this name was offered"]];
    let value;
    try {
      value = JSON.parse(this.#arguments);
    } catch {
      return ["not valid", "wrong", ["the arguments are no JSON"]];
    }
    const { problems, unread } = check(schema, value);
    if (problems.length) return ["not valid", "wrong", problems];
    if (unread.length) return ["valid where checked", "unsure", [`not checked: ${unread.join(", ")}`]];
    return ["valid", "right", []];
  }
}
