// One answer: its text as it comes, and what it took. `digits` and `seconds` are the planner's, from
// format.js.

import { Text, make } from "./text.js";
import { Thought } from "./thought.js";
import { Alignment, tokensOf } from "./tokens.js";

const WHY = { length: "cut off", stop: "", cancelled: "stopped" };

export const button = (name, work) => {
  const found = make("button", "", name);
  found.type = "button";
  found.addEventListener("click", work);
  return found;
};

/** Puts a text where it can be pasted from; by a selection where a page may not do so itself. */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = make("textarea");
    field.value = text;
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
}

/** A button that copies what `text` returns, and says that it did. */
export function copier(text) {
  const found = button("Copy", async () => {
    await copy(text());
    found.textContent = "Copied";
    setTimeout(() => (found.textContent = "Copy"), 1500);
  });
  return found;
}

export class Answer {
  text = "";
  reason = null; // why it ended
  #tokens = 0;
  #sent = performance.now();
  #first = null;
  #last = null;
  #alignment = new Alignment();
  #budget;
  #thought = null;
  #view;

  /** `budget`: the most tokens of its thought, or null. */
  constructor(name, budget = null) {
    this.#budget = budget;
    this.element = make("section", "answer");
    this.element.setAttribute("aria-label", name);
    this.body = make("div", "body waits");
    this.body.tabIndex = 0;
    this.body.setAttribute("role", "group");
    this.body.setAttribute("aria-label", `${name}: arrow keys lead along its tokens`);
    this.counts = make("span", "counts");
    this.under = make("div", "under");
    this.under.append(this.counts, copier(() => this.text));
    this.element.append(this.body, this.under);
    this.#view = new Text(this.body);
  }

  /** What a chunk says of it. */
  take(choice) {
    const text = choice.delta?.content ?? choice.text ?? "";
    const thought = choice.delta?.reasoning ?? "";
    let tokens = tokensOf(choice);
    if (text || thought || tokens.length) {
      this.#first ??= performance.now();
      this.#last = performance.now();
      this.#tokens += tokens.length || 1; // without log-probabilities a chunk is a token
      if (thought) this.#think(thought);
      if (text) this.#thought?.end();
      else this.#thought?.count(tokens.length || 1);
      // Tokens of a thought and of its marks are not in the text.
      if (thought || (this.#thought && !this.text && !text)) tokens = [];
      this.text += text;
      for (const [part, token] of this.#alignment.take(text, tokens)) this.#view.push(part, token);
    }
    if (choice.finish_reason) this.end(choice.finish_reason);
    else this.#count();
  }

  /** Nothing more comes. */
  end(reason) {
    if (this.reason !== null) return;
    this.reason = reason;
    for (const [part, token] of this.#alignment.end()) this.#view.push(part, token);
    this.#view.end();
    this.#thought?.end();
    this.body.classList.remove("waits");
    this.#count();
  }

  fail(message) {
    if (this.reason === null) this.end("failed");
    const problem = make("p", "problem", message);
    problem.setAttribute("role", "alert");
    this.body.after(problem);
  }

  #think(text) {
    if (this.#thought === null) {
      this.#thought = new Thought(this.#budget);
      this.body.before(this.#thought.element);
    }
    this.#thought.take(text);
  }

  #count() {
    const parts = [];
    if (this.#first !== null) {
      parts.push(`${digits(this.#tokens)} token${this.#tokens === 1 ? "" : "s"}`);
      parts.push(`first after ${seconds((this.#first - this.#sent) / 1000)}`);
      const rate = ((this.#tokens - 1) / (this.#last - this.#first)) * 1000;
      if (this.#tokens > 2 && Number.isFinite(rate)) parts.push(`${digits(rate)} a second`);
    }
    if (WHY[this.reason]) parts.push(WHY[this.reason]);
    this.counts.textContent = parts.join(", ");
  }
}
