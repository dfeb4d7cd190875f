// One answer: its text as it comes, and what it took. `digits` and `seconds` are the planner's, from
// format.js.

import { copier } from "./buttons.js";
import { Calls } from "./calls.js";
import { Text, make } from "./text.js";
import { Thought } from "./thought.js";
import { Alignment, tokensOf } from "./tokens.js";

const WHY = { length: "cut off", stop: "", cancelled: "stopped" };
const BROKEN_OFF = ["length", "cancelled", "failed"];

export class Answer {
  text = "";
  thought = "";
  calls = null;
  reason = null; // why it ended
  #tokens = 0;
  #sent = performance.now();
  #first = null;
  #last = null;
  #alignment = new Alignment();
  #budget;
  #thought = null;
  #schemaOf;
  #view;

  /**
   * `budget`: the most tokens of its thought, or null; `schemaOf`: returns the schema of a function's
   * arguments.
   */
  constructor(name, budget, schemaOf) {
    this.#budget = budget;
    this.#schemaOf = schemaOf;
    this.element = make("section", "answer");
    this.element.setAttribute("aria-label", name);
    this.body = make("div", "body waits");
    this.body.tabIndex = 0;
    this.body.setAttribute("role", "group");
    this.body.setAttribute("aria-label", `${name}: arrow keys lead along its tokens`);
    this.counts = make("span", "counts");
    this.under = make("div", "under");
    this.copier = copier(() => this.text);
    this.under.append(this.counts, this.copier);
    this.element.append(this.body, this.under);
    this.#view = new Text(this.body);
  }

  /** Whether its calls can have results: nothing of it is missing. */
  get isWhole() {
    return !BROKEN_OFF.includes(this.reason);
  }

  /** Its messages of a conversation, none where it came to nothing; `goesOn`: with its thought. */
  messages(goesOn) {
    const content = this.text || null;
    const results = this.calls?.responses;
    if (!results) return content ? [{ role: "assistant", content }] : [];
    const message = { role: "assistant", content, tool_calls: this.calls.requests };
    if (goesOn && this.thought) message.reasoning_content = this.thought;
    return [message, ...results];
  }

  /** What a chunk says of it. */
  take(choice) {
    const text = choice.delta?.content ?? choice.text ?? "";
    const thought = choice.delta?.reasoning ?? "";
    const calls = choice.delta?.tool_calls ?? [];
    let tokens = tokensOf(choice);
    if (text || thought || calls.length || tokens.length) {
      this.#first ??= performance.now();
      this.#last = performance.now();
      this.#tokens += tokens.length || 1; // without log-probabilities a chunk is a token
      if (thought) this.#think(thought);
      if (text || calls.length) this.#thought?.end();
      else this.#thought?.count(tokens.length || 1);
      if (calls.length) this.#call(calls);
      // Tokens of a thought, of calls and of their marks are not in the text.
      if (thought || this.calls || (this.#thought && !this.text && !text)) tokens = [];
      this.text += text;
      if (text) this.body.hidden = false;
      for (const [part, token] of this.#alignment.take(text, tokens)) this.#view.push(part, token);
    }
    if (choice.finish_reason) this.end(choice.finish_reason);
    else this.#count();
  }

  /** Nothing more comes. */
  end(reason) {
    if (this.reason !== null) return;
    this.reason = reason;
    this.#flush();
    this.#view.end();
    this.#thought?.end();
    this.calls?.end(this.isWhole);
    this.body.classList.remove("waits");
    this.body.hidden = this.copier.hidden = this.calls !== null && !this.text;
    this.#count();
  }

  fail(message) {
    if (this.reason === null) this.end("failed");
    const problem = make("p", "problem", message);
    problem.setAttribute("role", "alert");
    this.body.after(problem);
  }

  /** Shows text that waits for its tokens. */
  #flush() {
    for (const [part, token] of this.#alignment.end()) this.#view.push(part, token);
    this.#alignment = new Alignment();
  }

  #call(deltas) {
    if (this.calls === null) {
      this.#flush();
      this.calls = new Calls(this.#schemaOf);
      this.body.after(this.calls.element);
      this.body.classList.remove("waits");
      this.body.hidden = !this.text;
    }
    this.calls.take(deltas);
  }

  #think(text) {
    this.thought += text;
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
