// The thought of an answer: folded, with how long it is, and how much of its budget it has used.

import { Text, make } from "./text.js";

export class Thought {
  #tokens = 0;
  #pending = 0; // blanks, or the mark that ends it
  #budget;
  #view;
  #isNew = false;
  #isOver = false;

  /** `budget`: the most tokens that it may have, or null. */
  constructor(budget) {
    this.#budget = budget;
    this.element = make("details", "thought");
    this.said = make("span");
    const summary = make("summary");
    summary.append(this.said);
    if (budget) {
      this.bar = make("progress");
      this.bar.max = budget;
      this.bar.setAttribute("aria-label", "Used of the thought's tokens");
      summary.append(this.bar);
    }
    const body = make("div", "inner");
    this.element.append(summary, body);
    this.#view = new Text(body);
  }

  /** New text. */
  take(text) {
    this.#tokens += this.#pending;
    this.#pending = 0;
    this.#view.push(text, null);
    this.#isNew = true;
  }

  /** Tokens of a chunk, which has brought the newest text or none. */
  count(tokens) {
    if (this.#isOver) return;
    if (this.#isNew) this.#tokens += tokens;
    else this.#pending += tokens;
    this.#isNew = false;
    this.#say();
  }

  /** The answer begins, or ends. */
  end() {
    if (this.#isOver) return;
    this.#isOver = true;
    this.#view.end();
    this.#say();
  }

  #say() {
    const count = `${digits(this.#tokens)} token${this.#tokens === 1 ? "" : "s"}`;
    const most = this.#budget === null ? "" : ` of ${digits(this.#budget)}`;
    this.said.textContent = `${this.#isOver ? "Thought" : "Thinking"}: ${count}${most}`;
    if (this.bar) this.bar.value = Math.min(this.#tokens, this.#budget);
  }
}
